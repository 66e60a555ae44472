/* shuffle.c: NumPy's legacy RandomState.shuffle, exactly.
 *
 *     for i = n-1 .. 1:  j = the target of i;  swap x[i], x[j]
 *
 * Targets do not depend on the items: a batch of them is drawn, their cache lines are fetched AHEAD of the swaps, and so
 * the cost is that of memory bandwidth (one line in and one out, 3 ns an item in large arrays) and not of its latency (50
 * ns in NumPy). AHEAD: 64 is 1.3 times as slow, 128 to 256 are alike within 10 %.
 * Source: NumPy, RandomState.shuffle (frozen by NEP 19).
 */
#include "shuffle_targets.h"

#include <string.h>

enum { BATCH = 4096, AHEAD = 192 };

/* Written once, inlined where the bytes of an item and of a target are constants. */
#define INLINED static inline __attribute__((always_inline))

INLINED int64_t target_at(const void *targets, int64_t k, size_t target_bytes) {
    return target_bytes == 8 ? ((const int64_t *)targets)[k] : ((const uint32_t *)targets)[k];
}

INLINED void swap(char *a, char *b, size_t bytes) {
    char held[8];
    memcpy(held, a, bytes);
    memmove(a, b, bytes); /* may be one item */
    memcpy(b, held, bytes);
}

/* Steps i, i-1, ..., `count` of them. */
INLINED void swaps(char *x, size_t bytes, int64_t i, int64_t count, const void *targets, size_t target_bytes) {
    char *step = x + i * (int64_t)bytes;
#define PLACE(k) (x + target_at(targets, k, target_bytes) * (int64_t)bytes)
    for (int64_t k = 0; k < count && k < AHEAD; k++) __builtin_prefetch(PLACE(k), 1);
    for (int64_t k = 0; k < count; k++, step -= bytes) {
        if (k + AHEAD < count) __builtin_prefetch(PLACE(k + AHEAD), 1);
        swap(step, PLACE(k), bytes);
    }
#undef PLACE
}

/* The steps whose numbers exceed 32 bits; returns the next one. */
INLINED int64_t wide_steps(binidx_mt19937 *rng, char *x, int64_t i, size_t bytes) {
    int64_t targets[BATCH];
    for (int64_t count; i > UINT32_MAX; i -= count) {
        count = i - UINT32_MAX < BATCH ? i - UINT32_MAX : BATCH;
        binidx_shuffle_targets(rng, i, count, targets);
        swaps(x, bytes, i, count, targets, sizeof *targets);
    }
    return i;
}

INLINED void shuffle(binidx_mt19937 *rng, char *x, int64_t n, size_t bytes) {
    uint32_t targets[BATCH];
    for (int64_t i = wide_steps(rng, x, n - 1, bytes), count; i > 0; i -= count) {
        count = binidx_some_targets(rng, (uint32_t)i, i, BATCH, targets);
        swaps(x, bytes, i, count, targets, sizeof *targets);
    }
}

void binidx_shuffle_1(binidx_mt19937 *rng, void *data, int64_t n) { shuffle(rng, data, n, 1); }
void binidx_shuffle_2(binidx_mt19937 *rng, void *data, int64_t n) { shuffle(rng, data, n, 2); }
void binidx_shuffle_4(binidx_mt19937 *rng, void *data, int64_t n) { shuffle(rng, data, n, 4); }
void binidx_shuffle_8(binidx_mt19937 *rng, void *data, int64_t n) { shuffle(rng, data, n, 8); }
