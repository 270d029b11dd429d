// The rounding of activations for 8-bit products, on processors with AVX-512.

#include <cfloat>

#include "products.h"

namespace {

// One of the stages of a product with a Hadamard matrix: x[i] + x[j] and x[i] - x[j], where j is
// the lane in `swapped`.
__m512 add_and_subtract(__m512 x, __m512 swapped, __mmask16 second) {
    return _mm512_mask_sub_ps(_mm512_add_ps(x, swapped), second, swapped, x);
}

__m512 hadamard(__m512 x) {
    x = add_and_subtract(x, _mm512_permute_ps(x, 0xb1), 0xaaaa);
    x = add_and_subtract(x, _mm512_permute_ps(x, 0x4e), 0xcccc);
    x = add_and_subtract(x, _mm512_shuffle_f32x4(x, x, 0xb1), 0xf0f0);
    return add_and_subtract(x, _mm512_shuffle_f32x4(x, x, 0x4e), 0xff00);
}

// The bits of a magnitude, whose order as integers is that of floats, with NaN above all.
__m512i magnitude(__m512 x) { return _mm512_castps_si512(_mm512_abs_ps(x)); }

void round_row(const float *x, Index inputs, float *even, uint8_t *rounded, float *step) {
    const __m512 length = _mm512_set1_ps(0.17677670f);  // 1 / sqrt(32)
    __m512i most = magnitude(_mm512_set1_ps(127 * FLT_MIN));
    for (Index i = 0; i < inputs; i += 2 * LANES) {
        const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(x + i), length);
        const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(x + i + LANES), length);
        const __m512 sum = hadamard(_mm512_add_ps(a, b));
        const __m512 difference = hadamard(_mm512_sub_ps(a, b));
        _mm512_storeu_ps(even + i, sum);
        _mm512_storeu_ps(even + i + LANES, difference);
        most = _mm512_max_epi32(most, _mm512_max_epi32(magnitude(sum), magnitude(difference)));
    }
    const __m512i largest = _mm512_set1_epi32(_mm512_reduce_max_epi32(most));
    *step = _mm512_cvtss_f32(_mm512_castsi512_ps(largest)) / 127;
    const __m512 steps = _mm512_set1_ps(1 / *step);
    for (Index i = 0; i < inputs; i += LANES) {
        const __m512i near = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(even + i), steps));
        const __m512i shifted = _mm512_add_epi32(near, _mm512_set1_epi32(128));
        _mm_storeu_si128((__m128i *)(rounded + i), _mm512_cvtepi32_epi8(shifted));
    }
}

}  // namespace

extern "C" {

// Rows [rows, inputs] in a basis that evens out 32 columns at a time, as bytes of 1 to 255.
void round_rows_float32(const float *x, uint8_t *rounded, float *steps, Index rows, Index inputs,
                        Index threads) {
#pragma omp parallel num_threads(threads)
    {
        const auto even = allocate<float>(inputs);
#pragma omp for schedule(static)
        for (Index row = 0; row < rows; row++)
            round_row(x + row * inputs, inputs, even.get(), rounded + row * inputs, steps + row);
    }
}
}
