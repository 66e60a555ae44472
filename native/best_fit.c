/* best_fit.c: pieces of documents into bins of one capacity, each into the fullest bin that still has room.
 *
 *     capacity 8      pieces, longest first: 7 5 3 2 2 1        bins: [7 1] [5 3] [2 2]
 *
 * Bins are kept by the room they have left, in a list for each: heads[room] is the last bin, next[bin] the one before it.
 * A bit for each room that has a bin finds the smallest one that is enough, 64 at a time. Pieces of one length go in the
 * order of their numbers, so the bins are a function of the lengths.
 *
 * Cost: 3 passes, of which one hops about in 8 bytes a bin; the search is capacity / 64 words at worst.
 * Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (best-fit decreasing); the lists are ours.
 */
#include <string.h>
#include "binidx.h"

/* Longest first, in the order of their numbers within a length, by counting. 0 where a length is outside. */
static int sort_longest_first(const binidx_packing *p, int64_t *starts, int64_t *order) {
    memset(starts, 0, (size_t)(p->capacity + 1) * sizeof *starts);
    for (int64_t i = 0; i < p->num_pieces; i++) {
        if (p->lengths[i] < 1 || p->lengths[i] > p->capacity) return 0;
        starts[p->lengths[i]]++;
    }
    int64_t before = 0;
    for (int64_t length = p->capacity; length > 0; length--) {
        int64_t count = starts[length];
        starts[length] = before, before += count;
    }
    for (int64_t i = 0; i < p->num_pieces; i++) order[starts[p->lengths[i]]++] = i;
    return 1;
}

/* The smallest room of at least `least` that has a bin; -1 where there is none. */
static int64_t smallest_room(const uint64_t *open, int64_t num_words, int64_t least) {
    int64_t word = least >> 6;
    uint64_t bits = open[word] & ~UINT64_C(0) << (least & 63);
    while (!bits && ++word < num_words) bits = open[word];
    return bits ? word * 64 + __builtin_ctzll(bits) : -1;
}

/* bin_of[i] for every piece; the number of bins. */
static int64_t fill_bins(const binidx_packing *p) {
    int64_t num_words = (p->capacity >> 6) + 1, num_bins = 0;
    memset(p->open, 0, (size_t)num_words * sizeof *p->open);
    for (int64_t room = 0; room <= p->capacity; room++) p->heads[room] = -1;
    for (int64_t i = 0; i < p->num_pieces; i++) {
        int64_t piece = p->pieces[i], length = p->lengths[piece];
        int64_t room = smallest_room(p->open, num_words, length), bin = num_bins;
        if (room < 0) {
            room = p->capacity, num_bins++;
        } else {
            bin = p->heads[room], p->heads[room] = p->next[bin];
            if (p->heads[room] < 0) p->open[room >> 6] &= ~(UINT64_C(1) << (room & 63));
        }
        p->bin_of[piece] = bin, room -= length;
        p->next[bin] = p->heads[room], p->heads[room] = bin;
        p->open[room >> 6] |= UINT64_C(1) << (room & 63);
    }
    return num_bins;
}

/* The pieces bin by bin, in the order in which they went in. */
static void sort_by_bin(const binidx_packing *p, int64_t num_bins) {
    memset(p->bounds, 0, (size_t)(num_bins + 1) * sizeof *p->bounds);
    for (int64_t i = 0; i < p->num_pieces; i++) p->bounds[p->bin_of[i] + 1]++;
    for (int64_t bin = 0; bin < num_bins; bin++) p->bounds[bin + 1] += p->bounds[bin];
    /* Each bin's pieces are put from its start on, which moves to its end: the start of the next. */
    for (int64_t i = 0; i < p->num_pieces; i++) p->next[p->bounds[p->bin_of[p->pieces[i]]]++] = p->pieces[i];
    memmove(p->bounds + 1, p->bounds, (size_t)num_bins * sizeof *p->bounds);
    p->bounds[0] = 0;
    memcpy(p->pieces, p->next, (size_t)p->num_pieces * sizeof *p->pieces);
}

int64_t binidx_best_fit(const binidx_packing *p) {
    if (!sort_longest_first(p, p->heads, p->pieces)) return BINIDX_BAD_LENGTH;
    int64_t num_bins = fill_bins(p);
    sort_by_bin(p, num_bins);
    return num_bins;
}
