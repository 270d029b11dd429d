// For processors with avx2,fma.
#ifdef __x86_64__
#include "system.h"
#pragma GCC target("avx2,fma")
#include <immintrin.h>

#define BUILD avx2
#define LANES 8
#include "build.h"
#endif
