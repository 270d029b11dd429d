// What a layer of the Llama form computes between its products: norm and rotary embedding; and the
// rounding of its activations for 8-bit products.
#pragma once

#include "vectors.h"

namespace {

// An RMS norm (Zhang and Sennrich, 2019), computed in float32.
template <class X>
void normalise(const X *x, const X *weight, float epsilon, X *out, Index count) {
    V squares = {};
    for (Index i = 0; i < count; i += LANES) {
        const V each = load(x + i, count - i);
        squares += each * each;
    }
    const float scale = 1 / __builtin_sqrtf(sum(squares) / count + epsilon);
    for (Index i = 0; i < count; i += LANES)
        store(out + i, load(x + i, count - i) * scale * load(weight + i, count - i), count - i);
}

template <class X>
void normalise_rows(const X *x, const X *weight, float epsilon, X *out, Index rows, Index count,
                    Index threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Index row = 0; row < rows; row++)
        normalise(x + row * count, weight, epsilon, out + row * count, count);
}

// The rotary embedding (Su et al., 2021) of heads that follow one another, in place; its pairs are
// i and i + dim / 2. Where there is a weight, each head is normalised first.
template <class X>
void rotate_heads(X *x, Index row_stride, const X *cos, const X *sin, const X *weight,
                  float epsilon, Index rows, Index heads, Index dim, Index threads) {
    const Index half = dim / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Index row = 0; row < rows; row++)
        for (Index head = 0; head < heads; head++) {
            X *own = x + row * row_stride + head * dim;
            const X *of_cos = cos + row * dim, *of_sin = sin + row * dim;
            if (weight) normalise(own, weight, epsilon, own, dim);
            for (Index i = 0; i < half; i += LANES) {
                const Index n = half - i;
                const V a = load(own + i, n), b = load(own + half + i, n);
                store(own + i, a * load(of_cos + i, n) - b * load(of_sin + i, n), n);
                store(own + half + i,
                      b * load(of_cos + half + i, n) + a * load(of_sin + half + i, n), n);
            }
        }
}

// SwiGLU's product silu(a) * b (Shazeer, 2020), in place of a.
template <class X>
void gate(X *gates, const X *ups, Index count, Index threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Index i = 0; i < count; i += LANES) {
        const V a = load(gates + i, count - i), b = load(ups + i, count - i);
        const V limit = all(126.f), power = a * -1.44269504f;  // log2(e)
        const V gated = a / (1.f + exp2(power > limit ? limit : power)) * b;
        store(gates + i, power > limit ? V{} : gated, count - i);
    }
}

// Products with a Hadamard matrix of 32 columns: x[i] + x[j] and x[i] - x[j], where j = i ^ STEP.
template <int STEP>
void add_and_subtract(V *x) {
    constexpr int COUNT = 32 / LANES;
    if constexpr (STEP >= LANES) {
        for (int i = 0; i < COUNT; i++)
            if (const int j = i ^ STEP / LANES; j > i) {
                const V a = x[i], b = x[j];
                x[i] = a + b;
                x[j] = a - b;
            }
    } else {
        Integers second;
        for (int i = 0; i < LANES; i++) second[i] = i & STEP ? -1 : 0;
        for (int i = 0; i < COUNT; i++) {
            const V other = swapped<STEP>(x[i]);
            x[i] = second ? other - x[i] : x[i] + other;
        }
    }
}

// Rows in a basis that evens out 32 columns at a time (QuaRot: Ashkboos et al., 2024), as bytes of
// 1 to 255: steps of the row's largest magnitude / 127, and 128.
inline void round_rows(const float *x, uint8_t *rounded, float *steps, Index rows, Index count,
                       Index threads) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
#pragma omp parallel num_threads(threads)
    {
        const Buffer<float> even(count);
#pragma omp for schedule(static)
        for (Index row = 0; row < rows; row++) {
            Integers top = (Integers)all(127 * 1.17549435e-38f);
            for (Index i = 0; i < count; i += 32) {
                V part[32 / LANES];
                for (int n = 0; n < 32 / LANES; n++)
                    part[n] = load(x + row * count + i + n * LANES) * 0.17677670f;  // 1 / sqrt(32)
                add_and_subtract<16>(part);
                add_and_subtract<8>(part);
                add_and_subtract<4>(part);
                add_and_subtract<2>(part);
                add_and_subtract<1>(part);
                for (int n = 0; n < 32 / LANES; n++) {
                    store(&even[i + n * LANES], part[n]);
                    // — as integers, magnitudes have the order of floats, with NaN above all
                    const Integers magnitude = (Integers)part[n] & 0x7fffffff;
                    top = magnitude > top ? magnitude : top;
                }
            }
            int32_t largest = top[0];
            for (int i = 1; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
            float magnitude;
            memcpy(&magnitude, &largest, 4);
            steps[row] = magnitude / 127;
            const float scale = 1 / steps[row];
            for (Index i = 0; i < count; i += LANES) {
                const V shifted = load(&even[i]) * scale + (12582912.f + 128);  // 1.5 * 2^23: rounds
                const Bytes bytes = __builtin_convertvector((Bits)shifted & 255, Bytes);
                memcpy(rounded + row * count + i, &bytes, sizeof bytes);
            }
        }
    }
}

}  // namespace
