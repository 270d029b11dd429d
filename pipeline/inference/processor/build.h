// The functions of one build, whose names end in its own. Formats: 0 is float32, 1 bfloat16.
#pragma once

#include "attention.h"
#include "layers.h"

#define JOINED(name, build) name##_##build
#define NAME(name, build) JOINED(name, build)
#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// Attention of tensors in one format by products in another; false where the build has none.
EXPORTED bool NAME(attend, BUILD)(const Call *call, int of_tensors, int of_products) {
    if (of_products == 0 && of_tensors == 0) TreeAttention<float, float>(*call).run();
    else if (of_products == 0) TreeAttention<float, BFloat16>(*call).run();
#ifdef HAS_BFLOAT16
    else if (of_tensors == 0) TreeAttention<BFloat16, float>(*call).run();
    else TreeAttention<BFloat16, BFloat16>(*call).run();
#else
    else return false;
#endif
    return true;
}

EXPORTED void NAME(normalise, BUILD)(const void *x, const void *weight, float epsilon, void *out,
                            Index rows, Index count, int format, Index threads) {
    if (format == 0)
        normalise_rows((const float *)x, (const float *)weight, epsilon, (float *)out, rows, count,
                       threads);
    else
        normalise_rows((const BFloat16 *)x, (const BFloat16 *)weight, epsilon, (BFloat16 *)out,
                       rows, count, threads);
}

EXPORTED void NAME(rotate, BUILD)(void *x, Index row_stride, const void *cos, const void *sin,
                         const void *weight, float epsilon, Index rows, Index heads, Index dim,
                         int format, Index threads) {
    if (format == 0)
        rotate_heads((float *)x, row_stride, (const float *)cos, (const float *)sin,
                     (const float *)weight, epsilon, rows, heads, dim, threads);
    else
        rotate_heads((BFloat16 *)x, row_stride, (const BFloat16 *)cos, (const BFloat16 *)sin,
                     (const BFloat16 *)weight, epsilon, rows, heads, dim, threads);
}

EXPORTED void NAME(gate, BUILD)(void *gates, const void *ups, Index count, int format, Index threads) {
    if (format == 0) gate((float *)gates, (const float *)ups, count, threads);
    else gate((BFloat16 *)gates, (const BFloat16 *)ups, count, threads);
}

EXPORTED void NAME(round_rows, BUILD)(const float *x, uint8_t *rounded, float *steps, Index rows,
                             Index count, Index threads) {
    round_rows(x, rounded, steps, rows, count, threads);
}
}
