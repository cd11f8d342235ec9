// Threads of the OpenMP runtime.
#pragma once

namespace fastgraph {

// How many threads what the calling thread computes from now on has, torch's operations included.
void use_threads(int count);

}  // namespace fastgraph
