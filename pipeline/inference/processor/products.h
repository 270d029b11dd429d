// Vectors of AVX-512, and products of rows in the two number formats of attention.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#endif

using Index = int64_t;
using Unit = uint32_t;  // one float, or two bfloat16 numbers whose products are added at once
using BFloat16 = uint16_t;

constexpr Index LANES = 16;  // units of a vector

inline Index round_up(Index n, Index to) { return (n + to - 1) / to * to; }

inline __mmask16 lanes_below(Index count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
}

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

template <class T>
Buffer<T> allocate(Index count) {
    return Buffer<T>(static_cast<T *>(std::aligned_alloc(64, round_up(count * sizeof(T), 64))));
}

// In its scope numbers too small for the exponent are 0: computing with them is 100 times slower.
class WithoutDenormals {
    const unsigned before = _mm_getcsr();

   public:
    WithoutDenormals() { _mm_setcsr(before | 0x8040); }
    ~WithoutDenormals() { _mm_setcsr(before); }
};

// 2 to the power of x, to 2e-7; 0 for -inf.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.f), x);  // in this order NaN stays NaN
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 power = _mm512_set1_ps(1.33952915e-3f);
    for (const float coefficient :
         {9.67018250e-3f, 5.55031225e-2f, 2.40221068e-1f, 6.93147182e-1f, 1.f})
        power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(coefficient));
    return _mm512_scalef_ps(power, whole);
}

// ---- The two number formats. TILE is the rows of a product.

template <class T>
struct Format;

template <>
struct Format<float> {
    static constexpr Index PER_UNIT = 1, TILE = 6;
    static __m512 multiply_add(__m512 sum, Unit a, __m512 b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(a)), b, sum);
    }
    static __m512 load(__mmask16 lanes, const float *from) {
        return _mm512_maskz_loadu_ps(lanes, from);
    }
    static void store(float *to, __mmask16 lanes, __m512 x) {
        _mm512_mask_storeu_ps(to, lanes, x);
    }
};

#ifdef __AVX512BF16__
template <>
struct Format<BFloat16> {
#ifdef HAS_TILES
    static constexpr Index PER_UNIT = 2, TILE = 32;
#else
    static constexpr Index PER_UNIT = 2, TILE = 6;
#endif
    static __m512 multiply_add(__m512 sum, Unit a, __m512 b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
    }
    static __m512 load(__mmask16 lanes, const BFloat16 *from) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static void store(BFloat16 *to, __mmask16 lanes, __m512 x) {
        _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(x));
    }
    static __m512i pair(__m512 first, __m512 second) {
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
        const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
        return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
};
#endif

// ---- Products of a tile of rows: c [TILE, columns] (+)= a [TILE, units] . b [units, columns]

struct Product {
    const Unit *a;
    Index a_stride;
    const Unit *b;
    Index b_stride;
    float *c;
    Index c_stride, units;
    bool add;
};

template <class T, int N>
void multiply_vectors(const Product &p, Index first) {
    constexpr int ROWS = 6;
    __m512 sums[ROWS][N];
    float *c = p.c + first * LANES;
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++)
            sums[r][n] =
                p.add ? _mm512_loadu_ps(c + r * p.c_stride + n * LANES) : _mm512_setzero_ps();
    const Unit *a = p.a, *b = p.b + first * LANES;
    for (Index u = 0; u < p.units; u++, a++, b += p.b_stride) {
        __m512 column[N];
        for (int n = 0; n < N; n++) column[n] = _mm512_loadu_ps(b + n * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                sums[r][n] = Format<T>::multiply_add(sums[r][n], a[r * p.a_stride], column[n]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++) _mm512_storeu_ps(c + r * p.c_stride + n * LANES, sums[r][n]);
}

#ifdef HAS_TILES
// Tiles 0 to 3 hold 32 rows of 32 sums, 4 and 5 the rows of a, 6 and 7 the columns of b.
inline void configure_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
}

inline void multiply_tiles(const Product &p, Index vectors) {
    const Index a_bytes = p.a_stride * 4, b_bytes = p.b_stride * 4, c_bytes = p.c_stride * 4;
    for (Index n = 0; n < vectors; n += 2) {
        float *upper = p.c + n * LANES, *lower = upper + LANES * p.c_stride;
        if (p.add) {
            _tile_loadd(0, upper, c_bytes);
            _tile_loadd(1, upper + LANES, c_bytes);
            _tile_loadd(2, lower, c_bytes);
            _tile_loadd(3, lower + LANES, c_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (Index u = 0; u < p.units; u += LANES) {
            const Unit *b = p.b + u * p.b_stride + n * LANES;
            _tile_loadd(6, b, b_bytes);
            _tile_loadd(7, b + LANES, b_bytes);
            _tile_loadd(4, p.a + u, a_bytes);
            _tile_loadd(5, p.a + u + LANES * p.a_stride, a_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, upper, c_bytes);
        _tile_stored(1, upper + LANES, c_bytes);
        _tile_stored(2, lower, c_bytes);
        _tile_stored(3, lower + LANES, c_bytes);
    }
}
#endif

template <class T>
constexpr bool takes_tiles() {
    return Format<T>::TILE > 6;
}

template <class T>
void multiply(const Product &p, Index vectors) {
#ifdef HAS_TILES
    if constexpr (takes_tiles<T>()) return multiply_tiles(p, vectors);
#endif
    for (Index n = 0; n < vectors; n += 4) switch (vectors - n) {
            case 1: multiply_vectors<T, 1>(p, n); break;
            case 2: multiply_vectors<T, 2>(p, n); break;
            case 3: multiply_vectors<T, 3>(p, n); break;
            default: multiply_vectors<T, 4>(p, n);
        }
}
