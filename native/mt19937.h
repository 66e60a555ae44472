/* mt19937.h: drawing from a binidx_mt19937, inlined into the loops that do (C only: cffi reads binidx.h alone). */
#ifndef BINIDX_MT19937_H
#define BINIDX_MT19937_H
#include "cpu.h"

enum { BLOCK = 624 };

static inline uint32_t next_word(binidx_mt19937 *rng) {
    if (rng->position == BLOCK) binidx_mt19937_next_block(rng);
    return rng->words[rng->position++];
}

/* Two words, the one drawn first on top, as NumPy and torch both make 64 bits. */
static inline uint64_t next_two_words(binidx_mt19937 *rng) {
    uint64_t high = next_word(rng);
    return (high << 32) | next_word(rng);
}

#endif
