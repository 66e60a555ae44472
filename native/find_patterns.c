/* find_patterns.c: where any of many patterns stands in a text, by samples of its blocks.
 *
 *     patterns      "white rabbit", "mad hatter"     all are at least `window` long: 10
 *     text          ..ept on asking the white rabbit
 *                     [ on a]                        a block, hashed, is at no place of a pattern's first 10 bytes: none
 *                     stride 6 ─►                    begins at the 6 places from which its window has that block
 *     a known block those 6 windows are looked at: the patterns whose first 10 bytes have the hash of one are compared
 *
 * A bit a hash tells whether a pattern has the block anywhere in its window, and another one whether at its end. Samples
 * do not wait for one another, as the shifts of Wu and Manber do. For a single pattern, 64 places are passed over at once
 * where not its first and last byte stand.
 *
 * Cost: 0.2 ns a byte for one pattern; for many, 1 ns divided by the stride and a look at what the samples leave.
 * Source: us; hashed blocks as of Wu and Manber, 1994, TR-94-17.
 */
#include "binidx.h"
#include <string.h>

enum { PLACES = 64 };

static inline uint64_t word_before(const uint8_t *text, int64_t at) {
    uint64_t word = 0;
    if (at >= 8) memcpy(&word, text + at - 8, 8);
    else memcpy((char *)&word + 8 - at, text, (size_t)at);
    return word;
}

static const uint64_t FIRST = 0x9e3779b97f4a7c15u, SECOND = 0xff51afd7ed558ccdu;

/* Of the block that ends at `at`: 1 to 8 bytes, or 16. */
static inline uint64_t hash_block(const binidx_patterns *p, const uint8_t *text, int64_t at) {
    uint64_t word = word_before(text, at);
    if (p->block == 16) word ^= word_before(text, at - 8) * SECOND;
    else word >>= 64 - 8 * p->block;
    return word * FIRST >> (64 - p->bits);
}

/* Of the window that ends at `at`. */
static uint64_t hash_window(const binidx_patterns *p, const uint8_t *text, int64_t at) {
    uint64_t hash = 0;
    int64_t left = p->window;
    for (; left >= 8; left -= 8, at -= 8) hash = (hash ^ word_before(text, at)) * FIRST, hash ^= hash >> 29;
    if (left) hash = (hash ^ word_before(text, at) >> (64 - 8 * left)) * FIRST;
    return hash * SECOND >> (64 - p->head_bits);
}

static inline void set_bit(uint8_t *bits, uint64_t hash) { bits[hash >> 3] |= (uint8_t)(1 << (hash & 7)); }

static inline int has_bit(const uint8_t *bits, uint64_t hash) { return bits[hash >> 3] >> (hash & 7) & 1; }

int64_t binidx_index_patterns(const binidx_patterns *p) {
    memset(p->sampled, 0, (size_t)1 << (p->bits - 3));
    memset(p->ends, 0, (size_t)1 << (p->bits - 3));
    for (int64_t h = 0; h < (int64_t)1 << p->head_bits; h++) p->heads[h] = -1;
    for (int64_t k = p->num_patterns - 1; k >= 0; k--) {
        const uint8_t *pattern = p->bytes + p->bounds[k];
        if (p->bounds[k + 1] - p->bounds[k] < p->window) return BINIDX_BAD_LENGTH;
        for (int64_t i = 0; i < p->stride; i++) set_bit(p->sampled, hash_block(p, pattern, p->window - i * p->unit));
        set_bit(p->ends, hash_block(p, pattern, p->window));
        int32_t *head = p->heads + hash_window(p, pattern, p->window);
        p->next[k] = *head, *head = (int32_t)k;
    }
    return p->num_patterns;
}

/* Whether the only pattern may begin at one of PLACES places: the first and the last byte of its window stand there. The
 * compiler makes vectors of it. */
static inline int may_begin(const binidx_patterns *p, const uint8_t *first, const uint8_t *last) {
    uint8_t begins = p->bytes[0], ends = p->bytes[p->window - 1], any = 0;
    for (int i = 0; i < PLACES; i++) any |= (uint8_t)((first[i] == begins) & (last[i] == ends));
    return any;
}

/* The first place from `at` to `stop` where the block of a pattern ends, or one behind. */
static inline int64_t next_block(const binidx_patterns *p, const uint8_t *text, int64_t stop, int64_t at) {
    while (at <= stop && !has_bit(p->ends, hash_block(p, text, at))) at += p->unit;
    return at;
}

int64_t binidx_next_window(const binidx_patterns *p, const uint8_t *text, int64_t size, int64_t at, int64_t *pattern) {
    for (int64_t stop = at - 1; at > stop && at <= size; at = next_block(p, text, stop, at)) {
        int64_t places = p->num_patterns > 1 ? p->stride * p->unit : PLACES;
        if (p->num_patterns > 1)
            while (at <= size && !has_bit(p->sampled, hash_block(p, text, at))) at += places;
        else
            while (at + PLACES - 1 <= size && !may_begin(p, text + at - p->window, text + at - 1)) at += PLACES;
        stop = at + places - 1 < size ? at + places - 1 : size;
    }
    if (at <= size) *pattern = p->heads[hash_window(p, text, at)];
    return at;
}
