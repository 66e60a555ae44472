/* mt19937_64.c: the Mersenne Twister of 64-bit words, 312 at a time.
 *
 *     key      k         k+1                  k+156          ->   new k
 *              top 33 bits + low 31, twisted    xor
 *
 * As mt19937.c: a new word needs only words at least 156 places away, so the loops run in vectors. Cost: 1 ns a word.
 * Source: Nishimura 2000; C++'s std::mt19937_64 seeds and draws so.
 */
#include "mt19937_64.h"

enum { N = BLOCK_64, M = 156 };

static inline uint64_t twist(uint64_t high, uint64_t low) {
    uint64_t mixed = (high & 0xffffffff80000000u) | (low & 0x7fffffffu);
    return (mixed >> 1) ^ ((0u - (low & 1u)) & 0xb5026f5aa96619e9u);
}

static inline uint64_t temper(uint64_t y) {
    y ^= (y >> 29) & 0x5555555555555555u;
    y ^= (y << 17) & 0x71d67fffeda60000u;
    y ^= (y << 37) & 0xfff7eee000000000u;
    return y ^ (y >> 43);
}

void binidx_mt19937_64_seed(binidx_mt19937_64 *rng, uint64_t seed) {
    rng->key[0] = seed;
    for (uint64_t i = 1; i < N; i++)
        rng->key[i] = 6364136223846793005u * (rng->key[i - 1] ^ (rng->key[i - 1] >> 62)) + i;
    rng->position = N;
}

void binidx_mt19937_64_next_block(binidx_mt19937_64 *rng) {
    uint64_t *x = rng->key, *words = rng->words;
    for (int k = 0; k < N - M; k++) words[k] = temper(x[k] = x[k + M] ^ twist(x[k], x[k + 1]));
    for (int k = N - M; k < N - 1; k++) words[k] = temper(x[k] = x[k + M - N] ^ twist(x[k], x[k + 1]));
    words[N - 1] = temper(x[N - 1] = x[M - 1] ^ twist(x[N - 1], x[0]));
    rng->position = 0;
}
