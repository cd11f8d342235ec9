// Where GCC's choice of what to inline costs more than the call.
#pragma once

// For functions that call a kernel's inner loops: what these refer to stays in registers only where
// all of it is inlined. As arguments of a call, pointers and sizes would be read from memory again
// after each vector that is written, since it might have changed them. And for functions that do
// nothing but prefetch: GCC drops calls of them, since they have no result.
#define FASTGRAPH_INLINE __attribute__((always_inline)) inline
