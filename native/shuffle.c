/* shuffle.c: NumPy's legacy RandomState.shuffle, exactly.
 *
 *     for i = n-1 .. 1:  j = a number in [0, i], uniform;  swap x[i], x[j]
 *
 *     mask = 2^b - 1 >= i, the smallest        word & mask > i: drawn again
 *
 * i up to 2^32 - 1 draws 32-bit words; beyond it, two words a try, the high one first. Which words are drawn depends on i
 * alone, never on the items, so targets are drawn a batch ahead, their cache lines fetched, and only then swapped: the
 * cost is that of memory bandwidth (3 to 5 ns an item on large arrays) and not of its latency (50 ns in NumPy).
 * Source: NumPy, RandomState.shuffle over random_interval (frozen by NEP 19).
 */
#include "mt19937.h"

enum { BATCH = 2048, AHEAD = 128 };

/* The smallest 2^b - 1 >= i. */
static uint64_t mask_of(uint64_t i) {
    for (int shift = 1; shift < 64; shift *= 2) i |= i >> shift;
    return i;
}

/* A word makes at most one target, so `tries` words never run past the targets, and never draw a word too many. */
static void draw_32(binidx_mt19937 *rng, uint32_t mask, uint32_t i, int64_t count, int64_t *targets) {
    for (int64_t made = 0; made < count;) {
        if (rng->position == BLOCK) binidx_mt19937_next_block(rng);
        int64_t tries = BLOCK - rng->position < count - made ? BLOCK - rng->position : count - made;
        const uint32_t *words = rng->words + rng->position;
        rng->position += tries;
        for (int64_t w = 0; w < tries; w++) { /* no branch: it would be mispredicted at every third word */
            uint32_t target = words[w] & mask, accepted = target <= i;
            targets[made] = target;
            made += accepted;
            i -= accepted;
        }
    }
}

static void draw_64(binidx_mt19937 *rng, uint64_t mask, uint64_t i, int64_t count, int64_t *targets) {
    for (int64_t made = 0; made < count;) {
        uint64_t target = next_two_words(rng) & mask;
        if (target > i) continue;
        targets[made++] = (int64_t)target;
        i--;
    }
}

void binidx_shuffle_targets(binidx_mt19937 *rng, int64_t first, int64_t count, int64_t *targets) {
    for (int64_t made = 0; made < count;) {
        uint64_t i = (uint64_t)(first - made), mask = mask_of(i);
        int64_t same_mask = (int64_t)(i - mask / 2), run = same_mask < count - made ? same_mask : count - made;
        if (mask <= UINT32_MAX)
            draw_32(rng, (uint32_t)mask, (uint32_t)i, run, targets + made);
        else
            draw_64(rng, mask, i, run, targets + made);
        made += run;
    }
}

#define SHUFFLE(name, item)                                                                                            \
    void name(binidx_mt19937 *rng, void *data, int64_t n) {                                                            \
        item *x = data;                                                                                                \
        int64_t targets[BATCH];                                                                                        \
        for (int64_t i = n - 1, count; i > 0; i -= count) {                                                            \
            count = i < BATCH ? i : BATCH;                                                                             \
            binidx_shuffle_targets(rng, i, count, targets);                                                            \
            for (int64_t k = 0; k < count && k < AHEAD; k++) __builtin_prefetch(x + targets[k], 1);                    \
            for (int64_t k = 0; k < count; k++) {                                                                      \
                if (k + AHEAD < count) __builtin_prefetch(x + targets[k + AHEAD], 1);                                  \
                item held = x[i - k];                                                                                  \
                x[i - k] = x[targets[k]];                                                                              \
                x[targets[k]] = held;                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }

SHUFFLE(binidx_shuffle_4, uint32_t)
SHUFFLE(binidx_shuffle_8, uint64_t)
