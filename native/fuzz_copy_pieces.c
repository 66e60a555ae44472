/* fuzz_copy_pieces.c: pieces of any bounds in any order, against their definition.
 *
 * Input: pieces 1, count 1, room 1, flags 1, then two bytes a bound, one a number of the order; missing bytes are 0.
 * Flags: 1 bounds that rise, 2 numbers that there are.
 */
#include "binidx.h"
#include "fuzz.h"

enum { SIZE = 60 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    int64_t pieces = next(&in, 1) % 12, count = next(&in, 1) % 20, room = next(&in, 1), flags = next(&in, 1), most = 0;
    int64_t *bounds = bytes_of(8 * (pieces + 1)), *order = bytes_of(8 * count), at = 0;
    uint8_t *from = bytes_of(SIZE), *to = bytes_of(room);
    for (int i = 0; i < SIZE; i++) from[i] = (uint8_t)i;
    for (int64_t p = 0; p <= pieces; p++) {
        bounds[p] = next(&in, 2) % (SIZE + 3) - 1;
        if (flags & 1) bounds[p] = bounds[p] < most ? most : bounds[p] > SIZE ? SIZE : bounds[p];
        most = bounds[p] > most ? bounds[p] : most;
    }
    for (int64_t i = 0; i < count; i++) {
        order[i] = next(&in, 1) - 1;
        if (flags & 2) order[i] = pieces ? (order[i] + 1) % pieces : -1;
    }
    int64_t code = binidx_copy_pieces(from, SIZE, bounds, pieces, order, count, to, room);
    if (flags & 1) same(code != BINIDX_BAD_LENGTH);
    if (flags & 2 && pieces) same(code != BINIDX_BAD_DOCUMENT);
    for (int64_t i = 0; code >= 0 && i < count; i++)
        for (int64_t byte = bounds[order[i]]; byte < bounds[order[i] + 1]; byte++) same(to[at++] == from[byte]);
    if (code >= 0) same(at == code);
    note(&code, 8);
    if (code > 0) note(to, code);
    free(bounds), free(order), free(from), free(to);
    return 0;
}
