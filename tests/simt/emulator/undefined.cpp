// What C++ leaves undefined in arithmetic, and in arrays that a thread keeps to itself.
//
// Kernels and the host's side of them are compiled with the compiler's instrumentation for
// UndefinedBehaviorSanitizer, whose functions are ours: they end the launch, as memory.cpp does.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "machine.h"

namespace simt {
namespace {

// The first of what the compiler tells about each place.
struct Location {
  const char* file;
  uint32_t line;
  uint32_t column;
};

void undefined(const char* what, const Location& location) {
  const Place place{location.file, static_cast<int>(location.line)};
  const std::string report = std::string(what) + " at " + text(place);
  if (machine.current != nullptr) fail(*machine.current, report);
  std::fprintf(stderr, "%s\n", report.c_str());  // on the host, where there is no launch to end
  std::abort();
}

}  // namespace
}  // namespace simt

#define SIMT_UNDEFINED(name, what)                                        \
  extern "C" void __ubsan_handle_##name(const simt::Location* location) { \
    simt::undefined(what, *location);                                     \
  }
SIMT_UNDEFINED(add_overflow, "integer overflow")
SIMT_UNDEFINED(sub_overflow, "integer overflow")
SIMT_UNDEFINED(mul_overflow, "integer overflow")
SIMT_UNDEFINED(negate_overflow, "integer overflow")
SIMT_UNDEFINED(divrem_overflow, "division that overflows, or by zero,")
SIMT_UNDEFINED(shift_out_of_bounds, "shift by too much")
SIMT_UNDEFINED(out_of_bounds, "index out of a thread's own array")
SIMT_UNDEFINED(load_invalid_value, "value that its type does not have")
SIMT_UNDEFINED(invalid_builtin, "count of the zeros of zero")
SIMT_UNDEFINED(builtin_unreachable, "end of what cannot be reached")
SIMT_UNDEFINED(missing_return, "end of a function without its result")
