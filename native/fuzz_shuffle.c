/* fuzz_shuffle.c: shuffles and targets of any seed, length and state, at every level, against the rule in its plainest form.
 *
 * Input: seed 4, words drawn before 2, items 2, bytes of an item 1, first step of the targets 7; missing bytes are 0.
 */
#include "fuzz.h"
#include "mt19937.h"

static uint64_t plain_target(binidx_mt19937 *rng, uint64_t i) {
    uint64_t mask = i, target;
    for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    do target = (mask <= UINT32_MAX ? next_word(rng) : next_two_words(rng)) & mask;
    while (target > i);
    return target;
}

static void plain_shuffle(binidx_mt19937 *rng, uint8_t *x, int64_t n, size_t bytes) {
    for (int64_t i = n - 1; i > 0; i--) {
        uint8_t held[8], *a = x + (size_t)i * bytes, *b = x + plain_target(rng, (uint64_t)i) * bytes;
        memcpy(held, a, bytes), memmove(a, b, bytes), memcpy(b, held, bytes);
    }
}

static void same_state(const binidx_mt19937 *a, const binidx_mt19937 *b) {
    same(a->position == b->position && memcmp(a->key, b->key, sizeof a->key) == 0);
}

static void check_shuffle(binidx_mt19937 rng, int64_t n, size_t bytes) {
    size_t size = (size_t)n * bytes;
    uint8_t *found = bytes_of((int64_t)size), *needed = bytes_of((int64_t)size);
    for (size_t k = 0; k < size; k++) found[k] = needed[k] = (uint8_t)(k * 167 + k / 256 * 13);
    binidx_mt19937 plain = rng;
    plain_shuffle(&plain, needed, n, bytes);
    if (bytes == 1) binidx_shuffle_1(&rng, found, n);
    if (bytes == 2) binidx_shuffle_2(&rng, found, n);
    if (bytes == 4) binidx_shuffle_4(&rng, found, n);
    if (bytes == 8) binidx_shuffle_8(&rng, found, n);
    same(memcmp(found, needed, size) == 0);
    if (rng.level == BINIDX_PORTABLE) note(found, (int64_t)size);
    same_state(&rng, &plain);
    free(found), free(needed);
}

static void check_targets(binidx_mt19937 rng, int64_t first, int64_t count) {
    if (count > first) count = first;
    int64_t *found = bytes_of((size_t)count * sizeof *found);
    binidx_mt19937 plain = rng;
    binidx_shuffle_targets(&rng, first, count, found);
    for (int64_t k = 0; k < count; k++) same(found[k] == (int64_t)plain_target(&plain, (uint64_t)(first - k)));
    same_state(&rng, &plain);
    free(found);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint8_t input[16] = {0};
    uint32_t seed;
    uint16_t drawn, n;
    int64_t first = 0;
    memcpy(input, data, size < sizeof input ? size : sizeof input);
    memcpy(&seed, input, 4), memcpy(&drawn, input + 4, 2), memcpy(&n, input + 6, 2), memcpy(&first, input + 9, 7);
    first >>= input[8] & 63;
    if (n % 2) first = ((int64_t)1 << n / 2 % 54) + (first & 15) - 2; /* where masks and words change */
    if (first < 0) first = 0;
    for (int level = BINIDX_PORTABLE; level <= binidx_cpu_level(); level++) {
        binidx_mt19937 rng;
        binidx_mt19937_seed(&rng, seed, level);
        for (int w = 0; w < drawn % 1300; w++) next_word(&rng);
        check_shuffle(rng, n >> (input[8] & 15), (size_t)1 << (input[8] >> 6));
        check_targets(rng, first, drawn % 5000);
    }
    return 0;
}
