/* place.c: where ranges of a file lie in memory, of which some blocks are mapped, each somewhere else.
 *
 *     file       |  block 0  |  block 1  |  block 2  |      chunks: [....][####][####] ...  good or not
 *     memory        mapped at addresses[0]   -     addresses[2]
 *     range          [##]  ─►  addresses[0] + its place in the block
 *
 * Cost: two divisions and two cache misses a range. Other threads may mark chunks good meanwhile, after they set their
 * block's address; one that is not seen yet is 0, and its range is not here.
 */
#include "binidx.h"

int64_t binidx_place_ranges(const binidx_blocks *b, const int64_t *ranges, int64_t num_ranges, int64_t *places) {
    int64_t chunks = 0;
    for (int64_t i = 0; i < num_ranges; i++) {
        int64_t start = ranges[2 * i], stop = ranges[2 * i + 1];
        if (start < 0 || stop < start || stop > b->size) return BINIDX_NOT_HERE;
        if (start == stop) { /* where nothing is read any address will do */
            places[2 * i] = places[2 * i + 1] = (int64_t)(uintptr_t)b->good;
            continue;
        }
        int64_t block = start / b->block_bytes, chunk = start / b->chunk_bytes, last = (stop - 1) / b->chunk_bytes;
        if (stop > (block + 1) * b->block_bytes || !b->addresses[block]) return BINIDX_NOT_HERE;
        chunks += last - chunk + 1;
        for (; chunk <= last; chunk++)
            if (!b->good[chunk]) return BINIDX_NOT_HERE;
        b->used[block] = b->tick;
        places[2 * i] = b->addresses[block] + start - block * b->block_bytes;
        places[2 * i + 1] = places[2 * i] + stop - start;
    }
    return chunks;
}
