/* first_fit.c: pieces of documents into bins of one capacity, each into the first bin that still has room.
 *
 *     capacity 8      pieces in their order: 3 7 2 5 1 2        bins: [3 2 1 2] [7] [5]
 *
 * The room of every bin, and above it the largest room of each 16 bins, of each 256, ...: a search goes down from the top
 * to the first of 16 that is enough, a line of the cache a level.
 *
 *     level 1   5            8           ...
 *     level 0   0 5 1 ..     8 3 ..      ...      room of each bin
 *
 * Cost: two passes over the pieces, and for each one line of the cache a level, log16 of the bins; few of them are far.
 * Source: first fit as in the literature of bin packing (Johnson 1974); the tree is ours.
 */
#include <string.h>
#include "binidx.h"

enum { WAYS = 16, MOST_LEVELS = 16 };

/* Where each level begins in the tree for so many bins; the number of levels, of which the last has one node. */
static int levels_of(int64_t num_bins, int64_t *starts) {
    int levels = 0;
    int64_t at = 0, count = num_bins;
    do {
        starts[levels++] = at;
        at += (count + WAYS - 1) / WAYS * WAYS;
        count = (count + WAYS - 1) / WAYS;
    } while (count > 1 && levels < MOST_LEVELS - 1);
    starts[levels] = at;
    return levels;
}

int64_t binidx_first_fit_nodes(int64_t num_pieces) {
    int64_t starts[MOST_LEVELS + 1];
    return starts[levels_of(num_pieces, starts)];
}

static int64_t first_bin(const int32_t *rooms, const int64_t *starts, int levels, int32_t length) {
    int64_t node = 0;
    for (int level = levels - 1; level >= 0; level--) {
        const int32_t *group = rooms + starts[level] + node * WAYS;
        int way = 0;
        while (way < WAYS && group[way] < length) way++;
        if (way == WAYS) return -1; /* only at the top: a node below has the room that its parent says */
        node = node * WAYS + way;
    }
    return node;
}

static void set_room(int32_t *rooms, const int64_t *starts, int levels, int64_t bin, int32_t room) {
    int64_t node = bin;
    for (int level = 0; level < levels; level++, node /= WAYS) {
        int32_t *group = rooms + starts[level] + node / WAYS * WAYS, most = 0;
        if (rooms[starts[level] + node] == room) return;
        rooms[starts[level] + node] = room;
        for (int way = 0; way < WAYS; way++) most = group[way] > most ? group[way] : most;
        room = most;
    }
}

int64_t binidx_first_fit(const binidx_packing *p) {
    int64_t starts[MOST_LEVELS + 1], num_bins = 0;
    int levels = levels_of(p->num_pieces, starts);
    for (int64_t i = 0; i < p->num_pieces; i++) {
        if (p->lengths[i] < 1 || p->lengths[i] > p->capacity) return BINIDX_BAD_LENGTH;
    }
    memset(p->bounds, 0, (size_t)(p->num_pieces + 1) * sizeof *p->bounds);
    for (int64_t i = 0; i < p->num_pieces; i++) {
        int64_t bin = first_bin(p->rooms, starts, levels, p->lengths[i]);
        int32_t room = (int32_t)p->capacity;
        if (bin < 0) bin = num_bins++;
        else room = p->rooms[bin];
        set_room(p->rooms, starts, levels, bin, room - p->lengths[i]);
        p->bin_of[i] = bin, p->bounds[bin + 1]++;
    }
    for (int64_t bin = 0; bin < num_bins; bin++) p->bounds[bin + 1] += p->bounds[bin];
    /* Each bin's pieces are put from its start on, which moves to its end: the start of the next. */
    for (int64_t i = 0; i < p->num_pieces; i++) p->pieces[p->bounds[p->bin_of[i]]++] = i;
    memmove(p->bounds + 1, p->bounds, (size_t)num_bins * sizeof *p->bounds);
    p->bounds[0] = 0;
    return num_bins;
}
