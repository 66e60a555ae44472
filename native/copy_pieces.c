/* copy_pieces.c: pieces of a buffer, one after another in another order.
 *
 *     from     |a a a|b|c c|d d d d|       bounds 0 3 4 6 10
 *     order     2 0 3
 *     to       |c c|a a a|d d d d|
 *
 * The start of a piece is fetched while those before it are copied: it lies anywhere, so each is a miss of cache and TLB.
 * Cost: that of the bytes, and some 5 ns a piece.
 */
#include "binidx.h"

#include <string.h>

enum { AHEAD = 4, LINE = 64, FETCHED = 4 * LINE };

int64_t binidx_copy_pieces(const uint8_t *from, int64_t size, const int64_t *bounds, int64_t num_pieces,
                           const int64_t *order, int64_t count, uint8_t *to, int64_t room) {
    int64_t done = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t piece = order[i];
        if (piece < 0 || piece >= num_pieces) return BINIDX_BAD_DOCUMENT;
        if (i + AHEAD < count && order[i + AHEAD] >= 0 && order[i + AHEAD] < num_pieces) {
            int64_t next = bounds[order[i + AHEAD]];
            for (int64_t at = 0; at < FETCHED && next >= 0 && next + at < size; at += LINE)
                __builtin_prefetch(from + next + at);
        }
        int64_t start = bounds[piece], stop = bounds[piece + 1];
        if (start < 0 || stop < start || stop > size) return BINIDX_BAD_LENGTH;
        if (stop - start > room - done) return BINIDX_BAD_TOKENS;
        if (stop > start) memcpy(to + done, from + start, (size_t)(stop - start));
        done += stop - start;
    }
    return done;
}
