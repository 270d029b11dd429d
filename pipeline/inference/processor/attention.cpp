// Attention of queries over one span of keys, on processors with AVX-512.
//
// Online softmax by blocks of keys, as in FlashAttention (Dao et al., 2022). Keys and values are
// first copied into the layout of the products. Scores and sums are floats.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "products.h"
#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr Index BLOCK = 64;        // keys of a block
constexpr Index BLOCK_ROWS = 192;  // queries that read a block, tile after tile
constexpr float LEAST = -FLT_MAX;  // score
// A row's sums are scaled anew only where a score is larger by more than this: sums of weights of
// up to 2^8 lose nothing (FlashAttention-4, 2025).
constexpr float SLACK = 8;

struct Shape {
    Index batch, queries, keys, heads, kv_heads, dim;
    Index q[3], k[3], v[3], out[3], lse[3];  // strides of batch, row and head, in elements
    Index causal;                            // a query sees no key after its own
    Index offset;                            // the first query's position minus the first key's
    Index window;                            // a query sees this many positions back; 0: all
    Index merge;                             // out and lse hold attention over other keys
    Index threads;
};

// ---- Softmax

// One query's sums so far. The weight of a key is 2 to the power of its score minus `shift`.
struct Row {
    float *out;    // [columns]: the sum of the weighted values
    float *total;  // [LANES]: the sum of the weights, in parts
    float shift;   // the largest score, or less by SLACK at most
};

// Turns a row of scores into weights. Where MASKED, keys below `from` or not below `to` are not
// seen.
template <class T, bool MASKED>
void weigh(const float *scores, Index vectors, float scale, Index from, Index to, Index columns,
           Row &row, T *weights) {
    __m512 x[BLOCK / LANES], most = _mm512_set1_ps(LEAST);
    for (Index n = 0; n < vectors; n++) {
        x[n] = _mm512_mul_ps(_mm512_loadu_ps(scores + n * LANES), _mm512_set1_ps(scale));
        if constexpr (MASKED) {
            const __mmask16 seen = lanes_below(to - n * LANES) & ~lanes_below(from - n * LANES);
            x[n] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x[n]);
        }
        most = _mm512_max_ps(most, x[n]);
    }
    __m512 total = _mm512_loadu_ps(row.total);
    const float largest = _mm512_reduce_max_ps(most);
    if (largest > row.shift + SLACK) {
        const __m512 shrink = exp2(_mm512_set1_ps(row.shift - largest));
        total = _mm512_mul_ps(total, shrink);
        for (Index d = 0; d < columns; d += LANES)
            _mm512_storeu_ps(row.out + d, _mm512_mul_ps(_mm512_loadu_ps(row.out + d), shrink));
        row.shift = largest;
    }
    for (Index n = 0; n < vectors; n++) {
        x[n] = exp2(_mm512_sub_ps(x[n], _mm512_set1_ps(row.shift)));
        total = _mm512_add_ps(total, x[n]);
        Format<T>::store(weights + n * LANES, 0xffff, x[n]);
    }
    _mm512_storeu_ps(row.total, total);
}

// ---- Attention

// T is the number format of the products, X that of queries, keys, values and results.
template <class T, class X>
class Attention {
    static constexpr Index PER_UNIT = Format<T>::PER_UNIT, TILE = Format<T>::TILE;

    const Shape &s;
    const X *q, *k, *v;
    X *out;
    float *lse;
    const float scale;           // of scores whose exponents are of 2
    const Index units, columns;  // of the products with keys and with values, padded
    const Index blocks;
    const Buffer<Unit> packed_k, packed_v;  // of one head

    Unit *k_block(Index batch, Index block) const {
        return &packed_k[(batch * blocks + block) * units * BLOCK];
    }
    Unit *v_block(Index batch, Index block) const {
        return &packed_v[(batch * blocks + block) * (BLOCK / PER_UNIT) * columns];
    }

    // The keys that a query sees.
    Index from(Index row) const {
        return s.window ? std::max<Index>(0, row + s.offset - s.window + 1) : 0;
    }
    Index to(Index row) const {
        return s.causal ? std::min(s.keys, row + s.offset + 1) : s.keys;
    }

    // Keys [units, BLOCK] and values [units of keys, columns], zeros where there are none.
    void pack(Index batch, Index block, Index head) const {
        const Index first = block * BLOCK, count = std::min(BLOCK, s.keys - first);
        const X *keys = k + batch * s.k[0] + first * s.k[1] + head * s.k[2];
        const Index own = s.dim / PER_UNIT;
        Unit *to = k_block(batch, block);
        std::memset(to + own * BLOCK, 0, (units - own) * BLOCK * sizeof(Unit));
        for (Index n = 0; n < BLOCK; n += LANES)
            for (Index u = 0; u < own; u++) {
                const __m512i column =
                    gather(keys + n * s.k[1] + u * PER_UNIT, lanes_below(count - n));
                _mm512_storeu_si512(to + u * BLOCK + n, column);
            }
        const X *values = v + batch * s.v[0] + first * s.v[1] + head * s.v[2];
        to = v_block(batch, block);
        for (Index key = 0; key < BLOCK; key += PER_UNIT, values += PER_UNIT * s.v[1])
            for (Index d = 0; d < columns; d += LANES, to += LANES) {
                const __mmask16 there = lanes_below(s.dim - d), next = key + 1 < count ? there : 0;
                const __m512 x = Format<X>::load(key < count ? there : 0, values + d);
                __m512i unit = _mm512_castps_si512(x);
                if constexpr (PER_UNIT == 2)
                    unit = Format<T>::pair(x, Format<X>::load(next, values + s.v[1] + d));
                _mm512_storeu_si512(to, unit);
            }
    }

    // One unit of 16 keys.
    __m512i gather(const X *from, __mmask16 lanes) const {
        const __m512i lane =
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i row = _mm512_mullo_epi32(lane, _mm512_set1_epi32(s.k[1] * sizeof(X)));
        const __m512i none = _mm512_setzero_si512();
        const __m512i unit = _mm512_mask_i32gather_epi32(none, lanes, row, from, 1);
        if constexpr (sizeof(X) > sizeof(T)) {
            const __m512i next = _mm512_mask_i32gather_epi32(none, lanes, row, from + 1, 1);
            return Format<T>::pair(_mm512_castsi512_ps(unit), _mm512_castsi512_ps(next));
        }
        return unit;
    }

    void attend(Index batch, Index head, Index first) const {
        const Index count = std::min(BLOCK_ROWS, s.queries - first), padded = round_up(count, TILE);
        const auto queries = allocate<Unit>(padded * units);
        const auto sums = allocate<float>(padded * columns);
        const auto totals = allocate<float>(padded * LANES);
        const auto scores = allocate<float>(TILE * BLOCK);
        const auto weights = allocate<T>(TILE * BLOCK);
        std::memset(queries.get(), 0, padded * units * sizeof(Unit));
        std::memset(sums.get(), 0, padded * columns * sizeof(float));
        std::memset(totals.get(), 0, padded * LANES * sizeof(float));
        Row rows[BLOCK_ROWS + TILE];
        for (Index r = 0; r < padded; r++)
            rows[r] = {&sums[r * columns], &totals[r * LANES], LEAST};
        for (Index r = 0; r < count; r++) {
            const X *query = q + batch * s.q[0] + (first + r) * s.q[1] + head * s.q[2];
            T *own = reinterpret_cast<T *>(&queries[r * units]);
            for (Index d = 0; d < s.dim; d += LANES) {
                const __mmask16 lanes = lanes_below(s.dim - d);
                Format<T>::store(own + d, lanes, Format<X>::load(lanes, query + d));
            }
            if (s.merge) resume(rows[r], batch, head, first + r);
        }
        const Index last = first + count - 1;
        for (Index block = from(first) / BLOCK; block * BLOCK < to(last); block++)
            for (Index r = 0; r < count; r += TILE) {
                const Index start = block * BLOCK, top = first + r;
                const Index seen = to(std::min(top + TILE - 1, last)) - start;  // by any
                if (seen <= 0 || from(top) >= start + BLOCK) continue;
                // Tiles take two vectors at a time.
                const Index padded_keys = round_up(seen, takes_tiles<T>() ? 2 * LANES : LANES);
                const Index vectors = std::min(BLOCK, padded_keys) / LANES;
                multiply<T>({&queries[r * units], units, k_block(batch, block), BLOCK,
                             scores.get(), BLOCK, units, false},
                            vectors);
                const bool sees_all = from(last) <= start && start + vectors * LANES <= to(top);
                const auto weigh_row = sees_all ? weigh<T, false> : weigh<T, true>;
                for (Index row = 0; row < TILE; row++)
                    weigh_row(&scores[row * BLOCK], vectors, scale, from(top + row) - start,
                              to(top + row) - start, columns, rows[r + row], &weights[row * BLOCK]);
                multiply<T>({reinterpret_cast<Unit *>(weights.get()), BLOCK / PER_UNIT,
                             v_block(batch, block), columns, rows[r].out, columns,
                             vectors * LANES / PER_UNIT, true},
                            columns / LANES);
            }
        for (Index r = 0; r < count; r++) finish(rows[r], batch, head, first + r);
    }

    X *out_of(Index batch, Index head, Index row) const {
        return out + batch * s.out[0] + row * s.out[1] + head * s.out[2];
    }
    float &lse_of(Index batch, Index head, Index row) const {
        return lse[batch * s.lse[0] + row * s.lse[1] + head * s.lse[2]];
    }

    // Attention over other keys is the sum of one weighted value, whose score is the lse.
    void resume(Row &row, Index batch, Index head, Index number) const {
        const float before = lse_of(batch, head, number) * float(M_LOG2E);
        if (before < LEAST) return;
        row.shift = before;
        row.total[0] = 1;
        const X *sum = out_of(batch, head, number);
        for (Index d = 0; d < s.dim; d += LANES)
            _mm512_storeu_ps(row.out + d, Format<X>::load(lanes_below(s.dim - d), sum + d));
    }

    void finish(const Row &row, Index batch, Index head, Index number) const {
        const float total = _mm512_reduce_add_ps(_mm512_loadu_ps(row.total));
        const __m512 share = _mm512_set1_ps(total == 0 ? 0 : 1 / total);
        X *to = out_of(batch, head, number);
        for (Index d = 0; d < s.dim; d += LANES)
            Format<X>::store(to + d, lanes_below(s.dim - d),
                             _mm512_mul_ps(_mm512_loadu_ps(row.out + d), share));
        lse_of(batch, head, number) =
            total == 0 ? -INFINITY : (row.shift + std::log2(total)) * float(M_LN2);
    }

   public:
    Attention(const Shape &s, const X *q, const X *k, const X *v, X *out, float *lse, float scale)
        : s(s),
          q(q),
          k(k),
          v(v),
          out(out),
          lse(lse),
          scale(scale * float(M_LOG2E)),
          units(round_up(s.dim / PER_UNIT, takes_tiles<T>() ? LANES : 1)),
          columns(round_up(s.dim, takes_tiles<T>() ? 2 * LANES : LANES)),
          blocks(round_up(s.keys, BLOCK) / BLOCK),
          packed_k(allocate<Unit>(s.batch * blocks * units * BLOCK)),
          packed_v(allocate<Unit>(s.batch * blocks * (BLOCK / PER_UNIT) * columns)) {}

    void run() const {
        const Index group = s.heads / s.kv_heads;
        const Index row_blocks = round_up(s.queries, BLOCK_ROWS) / BLOCK_ROWS;
        const Index packs = s.batch * blocks, parts = s.batch * group * row_blocks;
#pragma omp parallel num_threads(s.threads)
        {
            const WithoutDenormals without;
#ifdef HAS_TILES
            if constexpr (takes_tiles<T>()) configure_tiles();
#endif
            for (Index head = 0; head < s.kv_heads; head++) {
#pragma omp for schedule(static)
                for (Index i = 0; i < packs; i++) pack(i / blocks, i % blocks, head);
#pragma omp for schedule(dynamic)
                for (Index i = 0; i < parts; i++) {
                    const Index part = parts - 1 - i, other = part / row_blocks;  // longest first
                    attend(other / group, head * group + other % group,
                           part % row_blocks * BLOCK_ROWS);
                }
            }
#ifdef HAS_TILES
            if constexpr (takes_tiles<T>()) _tile_release();
#endif
        }
    }
};

}  // namespace

extern "C" {

// Whether the code was compiled with products of bfloat16, and this process may use them.
bool computes_bfloat16() {
#if defined(HAS_TILES)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#elif defined(__AVX512BF16__)
    return true;
#else
    return false;
#endif
}

void attend_float32(const Shape *shape, const float *q, const float *k, const float *v, float *out,
                    float *lse, float scale) {
    Attention<float, float>(*shape, q, k, v, out, lse, scale).run();
}

#ifdef __AVX512BF16__
void attend_bfloat16(const Shape *shape, const BFloat16 *q, const BFloat16 *k, const BFloat16 *v,
                     BFloat16 *out, float *lse, float scale) {
    Attention<BFloat16, BFloat16>(*shape, q, k, v, out, lse, scale).run();
}

// Products of bfloat16 numbers, of queries, keys and values in float32.
void attend_narrowed(const Shape *shape, const float *q, const float *k, const float *v,
                     float *out, float *lse, float scale) {
    Attention<BFloat16, float>(*shape, q, k, v, out, lse, scale).run();
}
#endif
}
