// Vectors of LANES floats in the compiler's own notation, and the two number formats of tensors.
//
// A build (such as avx2.cpp) defines LANES, and the instructions that the compiler may use. All is
// in a namespace without a name, so that no build calls a function of another one. For the same
// reason there are no templates of the standard library.
#pragma once

namespace {

using Index = int64_t;
using BFloat16 = uint16_t;

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Narrow __attribute__((vector_size(2 * LANES)));

inline Index round_up(Index n, Index to) { return (n + to - 1) / to * to; }
inline Index least(Index a, Index b) { return a < b ? a : b; }
inline Index most(Index a, Index b) { return a > b ? a : b; }

template <class T>
class Buffer {
    T *const memory;

   public:
    explicit Buffer(Index count)
        : memory(static_cast<T *>(aligned_alloc(64, round_up(count * sizeof(T) + 1, 64)))) {}
    Buffer(const Buffer &) = delete;
    ~Buffer() { free(memory); }
    T *get() const { return memory; }
    T &operator[](Index i) const { return memory[i]; }
};

// In its scope numbers too small for the exponent are 0: computing with them is 100 times slower.
class WithoutDenormals {
#ifdef __x86_64__
    const unsigned before = __builtin_ia32_stmxcsr();

   public:
    WithoutDenormals() { __builtin_ia32_ldmxcsr(before | 0x8040); }
    ~WithoutDenormals() { __builtin_ia32_ldmxcsr(before); }
#endif
};

inline V all(float x) { return V{} + x; }

// One number in the format of `to`.
inline void convert(float x, float *to) { *to = x; }
inline void convert(BFloat16 x, BFloat16 *to) { *to = x; }
inline void convert(BFloat16 x, float *to) {
    const uint32_t bits = uint32_t(x) << 16;
    memcpy(to, &bits, 4);
}
inline void convert(float x, BFloat16 *to) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
}

inline V load(const float *from) {
    V x;
    memcpy(&x, from, sizeof x);
    return x;
}
inline V load(const BFloat16 *from) {
    Narrow x;
    memcpy(&x, from, sizeof x);
    return (V)(__builtin_convertvector(x, Bits) << 16);
}

inline void store(float *to, V x) { memcpy(to, &x, sizeof x); }
inline void store(BFloat16 *to, V x) {
#ifdef HAS_BFLOAT16
    const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &half, sizeof half);
#else
    const Bits bits = (Bits)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Narrow half = __builtin_convertvector(x != x ? Bits{} + 0x7fc0 : rounded, Narrow);
    memcpy(to, &half, sizeof half);
#endif
}

// The first `count` lanes; others are 0, and are not written.
template <class X>
V load(const X *from, Index count) {
    if (count >= LANES) return load(from);
    X some[LANES] = {};
    memcpy(some, from, count * sizeof(X));
    return load(some);
}
template <class X>
void store(X *to, V x, Index count) {
    if (count >= LANES) return store(to, x);
    X some[LANES];
    store(some, x);
    memcpy(to, some, count * sizeof(X));
}

// The lanes in another order: lane i gets lane i ^ STEP.
template <int STEP>
V swapped(V x) {
    Integers from;
    for (int i = 0; i < LANES; i++) from[i] = i ^ STEP;
    return __builtin_shuffle(x, from);
}

inline V larger(V a, V b) { return a > b ? a : b; }

template <int STEP = LANES / 2>
float largest(V x) {
    x = larger(x, swapped<STEP>(x));
    if constexpr (STEP > 1) return largest<STEP / 2>(x);
    return x[0];
}

template <int STEP = LANES / 2>
float sum(V x) {
    x += swapped<STEP>(x);
    if constexpr (STEP > 1) return sum<STEP / 2>(x);
    return x[0];
}

// 2 to the power of x, to 2e-7; 0 below -127, and NaN of NaN. x is at most 127.
inline V exp2(V x) {
    const V most_negative = all(-127.f), shift = all(12582912.f);  // 1.5 * 2^23: rounds to integers
    x = x < most_negative ? most_negative : x;
    const V shifted = x + shift, part = x - (shifted - shift);
    V power = all(1.33952915e-3f);
    for (const float coefficient :
         {9.67018250e-3f, 5.55031225e-2f, 2.40221068e-1f, 6.93147182e-1f, 1.f})
        power = power * part + coefficient;
    return power * (V)(((Bits)shifted << 23) + (127u << 23));
}

}  // namespace
