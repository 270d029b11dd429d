// Attention over the prompt tree by its table of tiles (attention/tiles.py), one call a layer.
//
// Online softmax by blocks of keys, as in FlashAttention (Dao et al., 2022). The query heads that
// share a head of the keys are rows of one tile (as in Shazeer's multi-query attention, 2019).
// Blocks that a tile sees whole are copied once into the layout of the products, for all tiles; the
// other keys of a tile are gathered into blocks of its own. Scores and sums are floats.
#pragma once

#include "products.h"

namespace {

constexpr Index BLOCK = 64;  // keys
constexpr float LEAST = -3.402823466e38f;  // score
constexpr float LOG2_E = 1.44269504f, LN_2 = .693147181f;
// A row's sums are scaled anew only where a score is larger by more than this: sums of weights of
// up to 2^8 lose nothing (FlashAttention-4, 2025).
constexpr float SLACK = 8;

// Of one layer. The strides are those of rows and of heads, in elements.
struct Call {
    const void *q, *k, *v, *prefix_k, *prefix_v;
    void *out;   // [queries, heads, dim]
    float *lse;  // [queries, heads]
    const int32_t *tiles, *subtree_stops, *positions, *document_starts;
    Index q_strides[2], k_strides[2], v_strides[2], prefix_k_strides[2], prefix_v_strides[2];
    Index tile_count, tile_rows, heads, kv_heads, dim, prefix_tokens, documents, first_query;
    Index window;  // a query sees this many positions back
    Index threads;
    float scale, softcap;  // of scores; 0: no softcap
};

struct Tile {
    int32_t first, stop, prefix_first, whole_first, whole_stop, own_first, document;
};

// A row sees the key if it is not before the key, is below the key's end, and is in its window.
struct Keys {
    int32_t row[BLOCK], stop[BLOCK], position[BLOCK];
};
constexpr int32_t NEVER = INT32_MAX;

// One query head of one row: its sums so far. The weight of a key is 2 to the power of its score
// minus `shift`.
struct Row {
    float *out;    // [columns]: the sum of the weighted values
    float *total;  // [LANES]: the sum of the weights, in parts
    float shift;   // the largest score, or less by SLACK at most
    int32_t row, position;
};

// Turns a row of scores into weights. Where MASKED, only some keys are seen.
template <class T, bool MASKED>
void weigh(const Call &c, const float *scores, Index vectors, Index columns, const Keys &keys,
           Row &row, T *weights) {
    V x[BLOCK / LANES], top = all(LEAST);
    const float scale = c.scale * LOG2_E;
    for (Index n = 0; n < vectors; n++) {
        x[n] = load(scores + n * LANES);
        if (c.softcap != 0) {  // tanh(a) = 1 - 2 / (1 + e^2a)
            const V limit = all(80.f), twice = x[n] * (2 * c.scale * LOG2_E / c.softcap);
            const V power = exp2(twice > limit ? limit : twice);
            x[n] = (1.f - 2.f / (power + 1.f)) * (c.softcap * LOG2_E);
        } else {
            x[n] *= scale;
        }
        if constexpr (MASKED) {
            Integers before, stop, position;
            memcpy(&before, keys.row + n * LANES, sizeof before);
            memcpy(&stop, keys.stop + n * LANES, sizeof stop);
            memcpy(&position, keys.position + n * LANES, sizeof position);
            const Integers seen = (before <= row.row) & (stop > row.row) &
                                  (row.position - position < int32_t(c.window));
            x[n] = seen ? x[n] : all(-__builtin_inff());
        }
        top = larger(x[n], top);
    }
    V total = load(row.total);
    const float largest_score = largest(top);
    if (largest_score > row.shift + SLACK) {
        const V shrink = exp2(all(row.shift - largest_score));
        total *= shrink;
        for (Index d = 0; d < columns; d += LANES)
            store(row.out + d, load(row.out + d) * shrink);
        row.shift = largest_score;
    }
    for (Index n = 0; n < vectors; n++) {
        x[n] = exp2(x[n] - row.shift);
        total += x[n];
        store(weights + n * LANES, x[n]);
    }
    store(row.total, total);
}

// T is the number format of the products, X that of queries, keys, values and results.
template <class T, class X>
class TreeAttention {
    static constexpr Index PER_UNIT = Format<T>::PER_UNIT, TILE = Format<T>::TILE;
    static constexpr Index STEP = takes_tiles(TILE) ? 2 * LANES : LANES;  // columns, at least
    using Unit = typename Format<T>::Unit;

    const Call &c;
    const Index group, units, columns;  // the last two: of products with keys, with values; padded
    const Index k_size, v_size;         // of a block, in units
    const Index prefix_blocks, blocks;
    const Buffer<int32_t> block_rows;       // where each block begins; -1 of none
    const Buffer<Unit> packed_k, packed_v;  // of one head, and of all whole blocks
    Index most_rest = 2 * BLOCK;            // keys of a tile that are in none of them

    struct Rest {
        const X *k, *v;
        int32_t row, stop, position;
    };

    struct Scratch {
        const Buffer<Unit> queries, k, v;
        const Buffer<float> sums, totals, scores;
        const Buffer<T> weights;
        const Buffer<Row> rows;
        const Buffer<Rest> rest;
        Keys keys;

        explicit Scratch(const TreeAttention &a, Index padded)
            : queries(padded * a.units), k(a.k_size), v(a.v_size), sums(padded * a.columns),
              totals(padded * LANES), scores(TILE * BLOCK), weights(TILE * BLOCK), rows(padded),
              rest(a.most_rest) {}
    };

    const X *key(Index row, Index head) const {
        return (const X *)c.k + row * c.k_strides[0] + head * c.k_strides[1];
    }
    const X *value(Index row, Index head) const {
        return (const X *)c.v + row * c.v_strides[0] + head * c.v_strides[1];
    }
    const X *prefix_key(Index row, Index head) const {
        return (const X *)c.prefix_k + row * c.prefix_k_strides[0] + head * c.prefix_k_strides[1];
    }
    const X *prefix_value(Index row, Index head) const {
        return (const X *)c.prefix_v + row * c.prefix_v_strides[0] + head * c.prefix_v_strides[1];
    }

    // One key and its value as number n of a block: keys [units, BLOCK], values [units, columns].
    void pack(const X *k, const X *v, Index n, Unit *to_k, Unit *to_v) const {
        T *values = (T *)(to_v + n / PER_UNIT * columns) + n % PER_UNIT;
        for (Index d = 0; d < c.dim; d += PER_UNIT) {
            T unit[PER_UNIT];  // — one store of it takes half the time of a store of each number
            for (Index p = 0; p < PER_UNIT; p++) convert(k[d + p], unit + p);
            memcpy(to_k + d / PER_UNIT * BLOCK + n, unit, sizeof unit);
        }
        for (Index d = 0; d < c.dim; d++) convert(v[d], values + d * PER_UNIT);
    }

    void pack_block(Index block, Index head) const {
        Unit *to_k = &packed_k[block * k_size], *to_v = &packed_v[block * v_size];
        memset(to_k, 0, k_size * sizeof(Unit));
        memset(to_v, 0, v_size * sizeof(Unit));
        for (Index n = 0; n < BLOCK; n++) {
            const Index row = block_rows[block] + n;
            if (block < prefix_blocks)
                pack(prefix_key(row, head), prefix_value(row, head), n, to_k, to_v);
            else
                pack(key(row, head), value(row, head), n, to_k, to_v);
        }
    }

    // The whole blocks of a document follow one another.
    Index block_of(Index document) const {
        return prefix_blocks + round_up(c.document_starts[document], BLOCK) / BLOCK;
    }

    // The keys of a tile that are in no whole block, in the order of their rows.
    Index gather(const Tile &tile, Index whole_rest, Index head, Rest *rest) const {
        Index count = 0;
        const Index first = most(tile.prefix_first, prefix_blocks * BLOCK);
        for (Index i = first; i < c.prefix_tokens; i++)
            rest[count++] = {prefix_key(i, head), prefix_value(i, head), -1, NEVER, int32_t(i)};
        for (Index i = whole_rest; i < tile.whole_stop; i++)
            rest[count++] = {key(i, head), value(i, head), -1, NEVER, c.positions[i]};
        for (Index i = tile.own_first; i < tile.stop; i++)
            if (c.subtree_stops[i] > tile.first)
                rest[count++] = {key(i, head), value(i, head), int32_t(i), c.subtree_stops[i],
                                 c.positions[i]};
        return count;
    }

    // Takes a block of keys into the sums of all rows.
    void step(Scratch &s, Index padded, const Unit *k, const Unit *v, Index count,
              bool masked) const {
        const Index vectors = least(BLOCK, round_up(count, STEP)) / LANES;
        const auto weigh_row = masked ? weigh<T, true> : weigh<T, false>;
        for (Index r = 0; r < padded; r += TILE) {
            multiply<T>({&s.queries[r * units], units, k, BLOCK, s.scores.get(), BLOCK, units,
                         false},
                        vectors);
            for (Index i = 0; i < TILE; i++)
                weigh_row(c, &s.scores[i * BLOCK], vectors, columns, s.keys, s.rows[r + i],
                          &s.weights[i * BLOCK]);
            multiply<T>({(const Unit *)s.weights.get(), BLOCK / PER_UNIT, v, columns,
                         s.rows[r].out, columns, vectors * LANES / PER_UNIT, true},
                        columns / LANES);
        }
    }

    // Blocks that a window may hide in part: the positions of their keys follow one another.
    void over_blocks(Scratch &s, Index padded, Index block, Index stop, Index position,
                     Index farthest) const {
        for (; block < stop; block++, position += BLOCK) {
            const bool masked = farthest - position >= c.window;
            for (Index n = 0; n < BLOCK && masked; n++) {
                s.keys.row[n] = -1;
                s.keys.stop[n] = NEVER;
                s.keys.position[n] = position + n;
            }
            step(s, padded, &packed_k[block * k_size], &packed_v[block * v_size], BLOCK, masked);
        }
    }

    void attend(const Tile &tile, Index head, Scratch &s) const {
        const Index count = (tile.stop - tile.first) * group, padded = round_up(count, TILE);
        memset(s.queries.get(), 0, padded * units * sizeof(Unit));
        memset(s.sums.get(), 0, padded * columns * sizeof(float));
        memset(s.totals.get(), 0, padded * LANES * sizeof(float));
        Index farthest = 0;  // position of a row
        for (Index r = 0; r < padded; r++) {
            const int32_t row = tile.first + least(r, count - 1) / group;
            s.rows[r] = {&s.sums[r * columns], &s.totals[r * LANES], LEAST, row, c.positions[row]};
            farthest = most(farthest, c.positions[row]);
            if (r >= count) continue;
            const X *query = (const X *)c.q + (row - c.first_query) * c.q_strides[0] +
                             (head * group + r % group) * c.q_strides[1];
            T *own = (T *)&s.queries[r * units];
            for (Index d = 0; d < c.dim; d++) convert(query[d], own + d);
        }
        Index seen = tile.prefix_first / BLOCK;
        over_blocks(s, padded, seen, prefix_blocks, seen * BLOCK, farthest);
        const Index document = c.document_starts[tile.document], blocks = block_of(tile.document);
        const Index whole = (tile.whole_stop - document) / BLOCK;
        seen = least(whole, (tile.whole_first - document) / BLOCK);
        over_blocks(s, padded, blocks + seen, blocks + whole,
                    c.prefix_tokens + seen * BLOCK, farthest);
        const Index whole_rest = most(tile.whole_first, document + whole * BLOCK);
        const Index rest = gather(tile, whole_rest, head, s.rest.get());
        for (Index start = 0; start < rest; start += BLOCK) {
            const Index own = least(BLOCK, rest - start);
            for (Index n = 0; n < BLOCK; n++) {
                const bool is_key = n < own;
                const Rest each = s.rest[start + least(n, own - 1)];
                s.keys.row[n] = is_key ? each.row : NEVER;
                s.keys.stop[n] = is_key ? each.stop : 0;
                s.keys.position[n] = each.position;
                if (is_key) pack(each.k, each.v, n, s.k.get(), s.v.get());
            }
            clear_values(s, own);
            step(s, padded, s.k.get(), s.v.get(), own, true);
        }
        for (Index r = 0; r < count; r++) finish(s.rows[r], head * group + r % group);
    }

    // Zeros from value number `first` on: weights of 0 times what was there before may be NaN.
    void clear_values(Scratch &s, Index first) const {
        for (Index n = first; n < BLOCK; n++) {
            T *values = (T *)s.v.get() + n / PER_UNIT * columns * PER_UNIT + n % PER_UNIT;
            for (Index d = 0; d < c.dim; d++) values[d * PER_UNIT] = 0;
        }
    }

    void finish(const Row &row, Index head) const {
        const Index number = (row.row - c.first_query) * c.heads + head;
        const float total = sum(load(row.total)), share = total == 0 ? 0 : 1 / total;
        X *to = (X *)c.out + number * c.dim;
        for (Index d = 0; d < c.dim; d += LANES)
            store(to + d, load(row.out + d) * share, c.dim - d);
        c.lse[number] =
            total == 0 ? -__builtin_inff() : (row.shift + __builtin_log2f(total)) * LN_2;
    }

   public:
    explicit TreeAttention(const Call &c)
        : c(c),
          group(c.heads / c.kv_heads),
          units(round_up(round_up(c.dim, PER_UNIT) / PER_UNIT, takes_tiles(TILE) ? LANES : 1)),
          columns(round_up(c.dim, STEP)),
          k_size(units * BLOCK),
          v_size(BLOCK / PER_UNIT * columns),
          prefix_blocks(c.prefix_tokens / BLOCK),
          blocks(block_of(c.documents)),
          block_rows(blocks),
          packed_k(blocks * k_size),
          packed_v(blocks * v_size) {
        for (Index i = 0; i < c.tile_count; i++) {
            const Tile &tile = ((const Tile *)c.tiles)[i];
            most_rest = most(most_rest, 2 * BLOCK + tile.stop - tile.own_first);
        }
        for (Index i = 0; i < blocks; i++) block_rows[i] = i < prefix_blocks ? i * BLOCK : -1;
        for (Index i = 0; i < c.documents; i++) {
            const Index start = c.document_starts[i], whole = (c.document_starts[i + 1] - start) / BLOCK;
            for (Index n = 0; n < whole; n++) block_rows[block_of(i) + n] = start + n * BLOCK;
        }
    }

    void run() const {
#pragma omp parallel num_threads(c.threads)
        {
            const WithoutDenormals without;
#ifdef HAS_TILES
            if constexpr (takes_tiles(TILE)) configure_tiles();
#endif
            Scratch scratch(*this, round_up(c.tile_rows * group, TILE));
            memset(scratch.k.get(), 0, k_size * sizeof(Unit));
            memset(scratch.v.get(), 0, v_size * sizeof(Unit));
            for (Index head = 0; head < c.kv_heads; head++) {
#pragma omp for schedule(static)
                for (Index block = 0; block < blocks; block++)
                    if (block_rows[block] >= 0) pack_block(block, head);
#pragma omp for schedule(dynamic)
                for (Index i = 0; i < c.tile_count; i++)  // those of branches, the longest, are last
                    attend(((const Tile *)c.tiles)[c.tile_count - 1 - i], head, scratch);
            }
#ifdef HAS_TILES
            if constexpr (takes_tiles(TILE)) _tile_release();
#endif
        }
    }
};

}  // namespace
