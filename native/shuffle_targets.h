/* shuffle_targets.h: targets as shuffle.c draws them (C only: cffi reads binidx.h alone). */
#ifndef BINIDX_SHUFFLE_TARGETS_H
#define BINIDX_SHUFFLE_TARGETS_H
#include "mt19937.h"

/* Words that are accepted or rejected together; 13 times that is a block, and every vector width divides it. */
enum { GROUP = 48 };

/* Targets of steps i, i-1, ... for 1 <= i < 2^32: at least one, at most `most` and i, all that `room` entries have place
 * for save some GROUP. Returns their number: stopping where it suits keeps groups and blocks in step. */
int64_t binidx_some_targets(binidx_mt19937 *rng, uint32_t i, int64_t most, int64_t room, uint32_t *targets);

#endif
