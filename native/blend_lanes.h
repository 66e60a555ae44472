/* blend_lanes.h: the chunks of a blend side by side in vector lanes; included once for each width by blend_*.c, which
 * says what a vector V of W doubles is and how many vectors of chunks, GROUPS, one call draws.
 *
 *     slot   lane 0     lane 1     lane 2     lane 3          one V a slot: one dataset in W chunks
 *       0    w0, c0     w0, c0     w0, c0     w0, c0
 *       1    w1, c1     w1, c1     w1, c1     w1, c1          w * drawn - c of all W chunks at once, the best kept by a
 *      ...                                                    compare and a blend: nothing goes across the lanes
 *
 * Two ways, by the number of datasets: up to 16 in registers (blend_few.h), more in slots in memory, all of them or a
 * window of those that can win (blend_window.h).
 */
#include "blend_chunks.h"

enum { FEW = 16 };

/* In each lane the first slot of those furthest behind. In pairs: one compare decides for two. */
TARGET BINIDX_BLEND_INLINE void scan(const double *weights, const double *counts, int64_t slots, V drawn, V *best,
                                     V *slot) {
    V most = SPLAT(-INFINITY), at = SPLAT(0), now = SPLAT(0), left = SPLAT(-INFINITY);
    for (int64_t i = 0; i < slots; i += 2) {
        V one = SUB(MUL(LOAD(weights + i * W), drawn), LOAD(counts + i * W));
        V two = SUB(MUL(LOAD(weights + i * W + W), drawn), LOAD(counts + i * W + W));
        V more = MAX(one, two);
        M behind = GT(more, most);
        at = PICK(behind, now, at);
        left = PICK(behind, one, left);
        most = MAX(more, most);
        now = ADD(now, SPLAT(2));
    }
    *best = most;
    *slot = PICK(EQ(left, most), at, ADD(at, SPLAT(1)));
}

/* A few datasets of one chunk. */
BINIDX_BLEND_INLINE int64_t furthest_of_few(const binidx_blend *blend, const double *counts, double drawn) {
    double most = blend->weights[0] * drawn - counts[0];
    int64_t furthest = 0;
    for (int64_t d = 1; d < blend->num_datasets; d++) {
        double behind = blend->weights[d] * drawn - counts[d];
        if (behind > most) most = behind, furthest = d;
    }
    return furthest;
}

/* All datasets of one chunk: dataset = slot * W + lane. */
TARGET BINIDX_BLEND_INLINE int64_t furthest(const binidx_blend *blend, const double *counts, double drawn,
                                            double *most) {
    double bests[W], slots[W];
    V best, slot;
    scan(blend->weights, counts, blend->width / W, SPLAT(drawn), &best, &slot);
    STORE(bests, best), STORE(slots, slot);
    int64_t lane = 0;
    for (int64_t k = 1; k < W; k++)
        if (bests[k] > bests[lane] || (bests[k] == bests[lane] && slots[k] < slots[lane])) lane = k;
    *most = bests[lane];
    return (int64_t)slots[lane] * W + lane;
}

/* By the rule from the true counts; `different` is in how many datasets they and the guess's counts differ. */
TARGET static int64_t replay(const binidx_blend *blend, int64_t first, int64_t stop, double *counts, double *guess) {
    const int few = blend->num_datasets <= FEW;
    int64_t different = guess ? 0 : 1, sample = first;
    double most;
    for (int64_t d = 0; guess && d < blend->width; d++) different += counts[d] != guess[d];
    for (; sample < stop && different; sample++) {
        double drawn = binidx_blend_drawn(sample);
        int64_t right = few ? furthest_of_few(blend, counts, drawn) : furthest(blend, counts, drawn, &most);
        int64_t guessed = right;
        if (guess) {
            guessed = blend->dataset_index[sample];
            different -= (counts[right] != guess[right]) + (guessed != right && counts[guessed] != guess[guessed]);
            guess[guessed] = binidx_blend_after(blend, guessed, guess[guessed]);
        }
        binidx_blend_take(blend, sample, right, counts + right);
        if (!guess) continue;
        different += (counts[right] != guess[right]) + (guessed != right && counts[guessed] != guess[guessed]);
    }
    return sample - first;
}

#include "blend_few.h"
#include "blend_window.h"

#define FEW_CHUNKS(n)                                                                                                  \
    if (blend->num_datasets <= n) {                                                                                    \
        if (blend->limits) few_chunks(blend, first, length, counts, n, 1);                                             \
        else few_chunks(blend, first, length, counts, n, 0);                                                           \
        return;                                                                                                        \
    }

TARGET static void chunks(const binidx_blend *blend, int64_t first, int64_t length, double *counts) {
    FEW_CHUNKS(2)
    FEW_CHUNKS(4)
    FEW_CHUNKS(8)
    FEW_CHUNKS(16)
    slot_chunks(blend, first, length, counts);
}

