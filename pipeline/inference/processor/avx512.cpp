// For processors with avx512f,avx512bw,avx512vl,avx512dq,fma.
#ifdef __x86_64__
#include "system.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#include <immintrin.h>

#define BUILD avx512
#define LANES 16
#include "build.h"
#endif
