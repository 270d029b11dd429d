// The passes of a layer of the Llama form between its products, on processors with AVX-512.

#include <cmath>

#include "products.h"

namespace {

template <class X>
void normalise(const X *x, const X *weight, float epsilon, X *out, Index inputs) {
    __m512 sum = _mm512_setzero_ps();
    for (Index i = 0; i < inputs; i += LANES) {
        const __m512 each = Format<X>::load(lanes_below(inputs - i), x + i);
        sum = _mm512_fmadd_ps(each, each, sum);
    }
    const float mean = _mm512_reduce_add_ps(sum) / inputs;
    const __m512 scale = _mm512_set1_ps(1 / std::sqrt(mean + epsilon));
    for (Index i = 0; i < inputs; i += LANES) {
        const __mmask16 lanes = lanes_below(inputs - i);
        const __m512 scaled = _mm512_mul_ps(Format<X>::load(lanes, x + i), scale);
        Format<X>::store(out + i, lanes, _mm512_mul_ps(scaled, Format<X>::load(lanes, weight + i)));
    }
}

template <class X>
void rotate(const X *x, const X *cos, const X *sin, X *out, Index dim) {
    const Index half = dim / 2;
    for (Index i = 0; i < half; i += LANES) {
        const __mmask16 lanes = lanes_below(half - i);
        const auto load = [&](const X *from) { return Format<X>::load(lanes, from + i); };
        const __m512 a = load(x), b = load(x + half);
        const __m512 first = _mm512_mul_ps(a, load(cos));
        const __m512 second = _mm512_mul_ps(a, load(sin + half));
        Format<X>::store(out + i, lanes, _mm512_fnmadd_ps(b, load(sin), first));
        Format<X>::store(out + half + i, lanes, _mm512_fmadd_ps(b, load(cos + half), second));
    }
}

// a / (1 + e^-a) * b, to 3e-7 of it.
__m512 gated(__m512 a, __m512 b) {
    const __m512 power = exp2(_mm512_mul_ps(a, _mm512_set1_ps(-1.44269504f)));
    return _mm512_mul_ps(_mm512_div_ps(a, _mm512_add_ps(power, _mm512_set1_ps(1.f))), b);
}

template <class X>
void normalise_rows(const X *x, const X *weight, float epsilon, X *out, Index rows, Index inputs,
                    Index threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Index row = 0; row < rows; row++)
        normalise(x + row * inputs, weight, epsilon, out + row * inputs, inputs);
}

template <class X>
void rotate_heads(const X *x, const X *cos, const X *sin, X *out, Index rows, Index heads,
                  Index dim, Index threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Index row = 0; row < rows; row++)
        for (Index head = 0; head < heads; head++) {
            const Index at = (row * heads + head) * dim;
            rotate(x + at, cos + row * dim, sin + row * dim, out + at, dim);
        }
}

template <class X>
void add(X *x, const X *y, Index count, Index threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Index i = 0; i < count; i += LANES) {
        const __mmask16 lanes = lanes_below(count - i);
        const __m512 a = Format<X>::load(lanes, x + i), b = Format<X>::load(lanes, y + i);
        Format<X>::store(x + i, lanes, _mm512_add_ps(a, b));
    }
}

template <class X>
void gate(X *gates, const X *up, Index count, Index threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Index i = 0; i < count; i += LANES) {
        const __mmask16 lanes = lanes_below(count - i);
        const __m512 result =
            gated(Format<X>::load(lanes, gates + i), Format<X>::load(lanes, up + i));
        Format<X>::store(gates + i, lanes, result);
    }
}

}  // namespace

extern "C" {

#define OF_FORMAT(X, NAME)                                                                        \
    void normalise_##NAME(const X *x, const X *weight, float epsilon, X *out, Index rows,         \
                          Index inputs, Index threads) {                                          \
        normalise_rows(x, weight, epsilon, out, rows, inputs, threads);                           \
    }                                                                                             \
    void rotate_##NAME(const X *x, const X *cos, const X *sin, X *out, Index rows, Index heads,   \
                       Index dim, Index threads) {                                                \
        rotate_heads(x, cos, sin, out, rows, heads, dim, threads);                                \
    }                                                                                             \
    void add_##NAME(X *x, const X *y, Index count, Index threads) { add(x, y, count, threads); }  \
    void gate_##NAME(X *gates, const X *up, Index count, Index threads) {                         \
        gate(gates, up, count, threads);                                                          \
    }

OF_FORMAT(float, float32)
#ifdef __AVX512BF16__
OF_FORMAT(BFloat16, bfloat16)
#endif
}
