// What tasks work with, one after the other.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fastgraph {

// Made by a task for which none is left: one for each thread.
template <typename Work>
class Reused {
 public:
  template <typename Make>
  std::unique_ptr<Work> take(const Make& make) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        auto found = std::move(idle_.back());
        idle_.pop_back();
        return found;
      }
    }
    return make();
  }

  void give(std::unique_ptr<Work> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(work));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Work>> idle_;
};

}  // namespace fastgraph
