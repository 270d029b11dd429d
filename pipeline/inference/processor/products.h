// Products of a few rows: c [TILE, columns] (+)= a [TILE, units] . b [units, columns].
//
// A unit is one float, or two bfloat16 numbers whose products are added at once.
#pragma once

#include "vectors.h"

namespace {

template <class T>
struct Format;

template <>
struct Format<float> {
    static constexpr Index PER_UNIT = 1, TILE = 6;
    using Unit = float;
    static V multiply_add(V sum, Unit a, const Unit *b) { return a * load(b) + sum; }
};

#ifdef HAS_BFLOAT16
template <>
struct Format<BFloat16> {
#ifdef HAS_TILES
    static constexpr Index PER_UNIT = 2, TILE = 32;
#else
    static constexpr Index PER_UNIT = 2, TILE = 6;
#endif
    using Unit = uint32_t;
    static V multiply_add(V sum, Unit a, const Unit *b) {
        return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a),
                                   (__m512bh)_mm512_loadu_si512(b));
    }
};
#endif

template <class T>
struct Product {
    using Unit = typename Format<T>::Unit;
    const Unit *a;
    Index a_stride;
    const Unit *b;
    Index b_stride;
    float *c;
    Index c_stride, units;
    bool add;
};

constexpr bool takes_tiles(Index rows) { return rows > 6; }

// Vectors of columns that fit into the registers beside the sums of six rows.
constexpr Index AT_ONCE = LANES == 8 ? 2 : 4;

template <class T, int N>
void multiply_vectors(const Product<T> &p, Index first) {
    constexpr int ROWS = 6;
    V sums[ROWS][N];
    float *c = p.c + first * LANES;
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
            sums[r][n] = p.add ? load(c + r * p.c_stride + n * LANES) : V{};
    const auto *a = p.a, *b = p.b + first * LANES;
    for (Index u = 0; u < p.units; u++, a++, b += p.b_stride) {
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                sums[r][n] =
                    Format<T>::multiply_add(sums[r][n], a[r * p.a_stride], b + n * LANES);
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(c + r * p.c_stride + n * LANES, sums[r][n]);
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

inline void multiply_tiles(const Product<BFloat16> &p, Index vectors) {
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
            const auto *b = p.b + u * p.b_stride + n * LANES;
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
void multiply(const Product<T> &p, Index vectors) {
#ifdef HAS_TILES
    if constexpr (takes_tiles(Format<T>::TILE)) return multiply_tiles(p, vectors);
#endif
    for (Index n = 0; n < vectors; n += AT_ONCE) switch (least(AT_ONCE, vectors - n)) {
            case 1: multiply_vectors<T, 1>(p, n); break;
            case 2: multiply_vectors<T, 2>(p, n); break;
#if LANES != 8
            case 3: multiply_vectors<T, 3>(p, n); break;
            default: multiply_vectors<T, 4>(p, n);
#endif
        }
}

}  // namespace
