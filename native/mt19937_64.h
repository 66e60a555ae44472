/* mt19937_64.h: drawing from a binidx_mt19937_64, inlined into the loops that do (C only: cffi reads binidx.h alone). */
#ifndef BINIDX_MT19937_64_H
#define BINIDX_MT19937_64_H
#include "binidx.h"

enum { BLOCK_64 = 312 };

static inline uint64_t next_wide_word(binidx_mt19937_64 *rng) {
    if (rng->position == BLOCK_64) binidx_mt19937_64_next_block(rng);
    return rng->words[rng->position++];
}

#endif
