/* fuzz_first_fit.c: bins of any pieces against the rule, searched for one bin after the other.
 *
 * Input: capacity 1, pieces 2, flags 1, then a length of 1 byte each; missing bytes are 0. At most 600 pieces, so that
 * the tree of rooms has up to three levels.
 * Flags: 0 lengths as they are, and so mostly one of them outside; else all within.
 */
#include "binidx.h"
#include "fuzz.h"

enum { MOST_PIECES = 600 };

/* The bin that the rule takes for each piece; the number of bins. */
static int64_t by_the_rule(const binidx_packing *p, int64_t *bin_of) {
    int64_t num_bins = 0, *room = bytes_of(8 * p->num_pieces);
    for (int64_t i = 0; i < p->num_pieces; i++) {
        int64_t bin = 0;
        while (bin < num_bins && room[bin] < p->lengths[i]) bin++;
        if (bin == num_bins) room[num_bins++] = p->capacity;
        room[bin] -= p->lengths[i], bin_of[i] = bin;
    }
    free(room);
    return num_bins;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    binidx_packing p = {.capacity = next(&in, 1) + 1, .num_pieces = next(&in, 2) % (MOST_PIECES + 1)};
    int64_t flags = next(&in, 1), nodes = binidx_first_fit_nodes(p.num_pieces);
    int32_t *lengths = bytes_of(4 * p.num_pieces), right = 1;
    for (int64_t i = 0; i < p.num_pieces; i++) {
        lengths[i] = (int32_t)(flags ? 1 + next(&in, 1) % p.capacity : next(&in, 1));
        right &= lengths[i] > 0 && lengths[i] <= p.capacity;
    }
    p.lengths = lengths, p.pieces = bytes_of(8 * p.num_pieces), p.bounds = bytes_of(8 * (p.num_pieces + 1));
    p.bin_of = bytes_of(8 * p.num_pieces), p.rooms = memset(bytes_of(4 * nodes), 0, (size_t)(4 * nodes));
    int64_t *wanted = bytes_of(8 * p.num_pieces), num_bins = binidx_first_fit(&p);
    same((num_bins >= 0) == right);
    if (num_bins >= 0) {
        same(num_bins == by_the_rule(&p, wanted) && p.bounds[0] == 0 && p.bounds[num_bins] == p.num_pieces);
        for (int64_t b = 0; b < num_bins; b++) {
            for (int64_t at = p.bounds[b]; at < p.bounds[b + 1]; at++) {
                same(wanted[p.pieces[at]] == b && (at == p.bounds[b] || p.pieces[at - 1] < p.pieces[at]));
            }
        }
        note(p.pieces, 8 * p.num_pieces);
    }
    note(&num_bins, 8);
    free(lengths), free(p.pieces), free(p.bounds), free(p.bin_of), free(p.rooms), free(wanted);
    return 0;
}
