/* fuzz_best_fit.c: bins of any pieces against the rule, searched for one bin after the other.
 *
 * Input: capacity 1, pieces 1, flags 1, then a length of 1 byte each; missing bytes are 0.
 * Flags: 0 lengths as they are, and so mostly one of them outside; else all within.
 */
#include "binidx.h"
#include "fuzz.h"

/* The bin that the rule takes for each piece; the number of bins. Of bins with equal room the last that came to it. */
static int64_t by_the_rule(const binidx_packing *p, int64_t *bin_of) {
    int64_t num_bins = 0, *room = bytes_of(8 * p->num_pieces), *since = bytes_of(8 * p->num_pieces), now = 0;
    for (int64_t length = p->capacity; length > 0; length--) {
        for (int64_t i = 0; i < p->num_pieces; i++) {
            if (p->lengths[i] != length) continue;
            int64_t best = -1;
            for (int64_t b = 0; b < num_bins; b++) {
                if (room[b] < length) continue;
                if (best < 0 || room[b] < room[best] || (room[b] == room[best] && since[b] > since[best])) best = b;
            }
            if (best < 0) best = num_bins++, room[best] = p->capacity;
            room[best] -= length, since[best] = now++, bin_of[i] = best;
        }
    }
    free(room), free(since);
    return num_bins;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    binidx_packing p = {.capacity = next(&in, 1) + 1, .num_pieces = next(&in, 1)};
    int64_t flags = next(&in, 1);
    int32_t *lengths = bytes_of(4 * p.num_pieces), right = 1;
    for (int64_t i = 0; i < p.num_pieces; i++) {
        lengths[i] = (int32_t)(flags ? 1 + next(&in, 1) % p.capacity : next(&in, 1));
        right &= lengths[i] > 0 && lengths[i] <= p.capacity;
    }
    p.lengths = lengths, p.pieces = bytes_of(8 * p.num_pieces), p.bounds = bytes_of(8 * (p.num_pieces + 1));
    p.bin_of = bytes_of(8 * p.num_pieces), p.next = bytes_of(8 * p.num_pieces);
    p.heads = bytes_of(8 * (p.capacity + 1)), p.open = bytes_of(8 * ((p.capacity >> 6) + 1));
    int64_t *wanted = bytes_of(8 * p.num_pieces), num_bins = binidx_best_fit(&p);
    same((num_bins >= 0) == right);
    if (num_bins >= 0) {
        same(num_bins == by_the_rule(&p, wanted) && p.bounds[num_bins] == p.num_pieces);
        for (int64_t b = 0; b < num_bins; b++) {
            int64_t tokens = 0;
            for (int64_t at = p.bounds[b]; at < p.bounds[b + 1]; at++) {
                tokens += lengths[p.pieces[at]];
                same(wanted[p.pieces[at]] == b && (at == p.bounds[b] || lengths[p.pieces[at - 1]] >= lengths[p.pieces[at]]));
            }
            same(tokens <= p.capacity);
        }
        note(p.pieces, 8 * p.num_pieces);
    }
    note(&num_bins, 8);
    free(lengths), free(p.pieces), free(p.bounds), free(p.bin_of), free(p.next), free(p.heads), free(p.open), free(wanted);
    return 0;
}
