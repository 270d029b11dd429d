// For processors with avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,fma.
#ifdef __x86_64__
#include "system.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,fma,prefer-vector-width=512")
#include <immintrin.h>

#define BUILD amx
#define LANES 16
#define HAS_BFLOAT16
#define HAS_TILES
#include "build.h"
#endif
