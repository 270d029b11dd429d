// For processors with avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma.
#ifdef __x86_64__
#include "system.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,prefer-vector-width=512")
#include <immintrin.h>

#define BUILD avx512bf16
#define LANES 16
#define HAS_BFLOAT16
#include "build.h"
#endif
