/* masked_mapping.c: the samples of masked datasets, runs of whole sequences (sentences) of one document.
 *
 *     target 9       3 4 5 | 2 2 6 | 1 1        tokens of the sequences of a document
 *                    ─────   ─────   ───
 *                     12      10      2         cut where the target is met and enough sequences are left, and at the end
 *
 * Each run has its own target: the longest, or for one draw in `short_ratio` a shorter one. A document with too few
 * sequences, or with one of more than LONGEST tokens, has no samples. Epochs follow each other until there are enough
 * samples; then all rows are shuffled: i = n-1 .. 1 swaps with a 64-bit word mod (i + 1).
 *
 * The documents are judged once; then the samples are counted, and then written: 1 ns a sequence for each of the three,
 * most of it branches that no processor foresees. Where no target is drawn, all epochs are the first one, which is
 * counted once and copied. The targets of the shuffle are drawn a batch at a time, and their lines fetched AHEAD of the
 * swaps: 8 ns a row.
 * Source: Megatron Core, build_mapping and build_blocks_mapping, which judge each document anew in every epoch, twice.
 */
#include "mt19937.h"
#include "mt19937_64.h"
#include "unaligned.h"

enum { LONGEST = 512, BATCH = 1024, AHEAD = 64 };

#define INLINED static inline __attribute__((always_inline))

/* Whether document d lies within the sequences; a mapped file may be written to at any time. */
INLINED int has_bounds(const binidx_masked *m, int64_t d, int64_t *first, int64_t *end) {
    *first = load_i64(m->documents, d), *end = load_i64(m->documents, d + 1);
    return 0 <= *first && *first <= *end && *end <= m->num_sequences;
}

/* The tokens of some sequences as usable[d] has them; *is_long: whether one of them is too long. In vectors. */
static uint32_t tokens_of(const binidx_masked *m, int64_t first, int64_t end, int *is_long) {
    int64_t tokens = 0;
    int found = 0, negative = 0;
    for (int64_t i = first; i < end; i++) {
        int32_t length = load_i32(m->sequence_lengths, i);
        tokens += length, found |= length > LONGEST, negative |= length < 0;
    }
    *is_long = found;
    return negative || tokens >= UINT32_MAX - 1 ? UINT32_MAX : (uint32_t)tokens + 1;
}

int64_t binidx_usable_documents(const binidx_masked *m, uint32_t *usable, int64_t *counts) {
    const int64_t judged = m->titles ? m->least : 2; /* a masked sample may be one long sequence if it is all there is */
    int64_t first, end, num_usable = 0;
    counts[0] = counts[1] = counts[2] = 0;
    for (int64_t d = 0; d < m->num_documents; d++) {
        if (!has_bounds(m, d, &first, &end)) return counts[0] = d, BINIDX_BAD_DOCUMENT;
        int is_long;
        uint32_t tokens = tokens_of(m, first, end, &is_long);
        is_long &= end - first >= judged;
        counts[0] += end == first, counts[1] += end - first == 1, counts[2] += is_long;
        usable[d] = end - first >= m->least && !is_long ? tokens : 0;
        num_usable += usable[d] != 0;
    }
    return num_usable;
}

INLINED int64_t next_target(const binidx_masked *m, binidx_mt19937 *rng, int64_t document) {
    if (m->titles) return m->sequence_length - m->titles[document];
    if (m->short_ratio == 0) return m->sequence_length;
    uint64_t word = next_word(rng);
    return word % (uint64_t)m->short_ratio ? m->sequence_length : (int64_t)(2 + word % (uint64_t)(m->sequence_length - 1));
}

/* The end of the run that begins at `first`. *left: tokens from there to the end of the document, and then from the run's
 * end on: where they do not meet the target, nothing is read. */
INLINED int64_t run_end(const binidx_masked *m, int64_t first, int64_t end, int64_t target, int64_t *left) {
    const int64_t last = end - (m->titles ? m->least : 2), least = first + m->least - 1;
    int64_t i = first, tokens = 0;
    if (*left < target) return end;
    for (; i < last && i < least; i++) tokens += load_i32(m->sequence_lengths, i);
    while (i < last)
        if ((tokens += load_i32(m->sequence_lengths, i++)) >= target) return *left -= tokens, i;
    return end;
}

INLINED void put(void *rows, int wide, int64_t i, int64_t value) {
    if (wide) ((uint64_t *)rows)[i] = (uint64_t)value;
    else ((uint32_t *)rows)[i] = (uint32_t)value;
}

/* The rows of one epoch from row `made` on, no more than `room`; with no rows they are counted only. */
INLINED int64_t epoch_rows(const binidx_masked *m, const uint32_t *usable, binidx_mt19937 *rng, int64_t made, int64_t room,
                           void *rows, int wide) {
    int64_t first, end, block = 0;
    for (int64_t d = 0; d < m->num_documents; d++) {
        if (!usable[d]) continue;
        if (!has_bounds(m, d, &first, &end)) return BINIDX_BAD_DOCUMENT;
        /* Half of all: lengths below 0 add to what is left. */
        int64_t target = next_target(m, rng, d), left = usable[d] == UINT32_MAX ? INT64_MAX / 2 : usable[d] - 1;
        for (int64_t stop; first < end; first = stop, made++) {
            stop = run_end(m, first, end, target, &left);
            if (rows) {
                if (made == room) return BINIDX_BAD_TOKENS;
                const int64_t columns = m->titles ? 4 : 3;
                put(rows, wide, columns * made, first), put(rows, wide, columns * made + 1, stop);
                put(rows, wide, columns * made + 2, m->titles ? d : target);
                if (m->titles) put(rows, wide, columns * made + 3, block++);
            }
            target = next_target(m, rng, d);
        }
    }
    return made;
}

int64_t binidx_count_masked(const binidx_masked *m, const uint32_t *usable, binidx_mt19937 *rng, int64_t num_epochs,
                            int64_t num_samples, int64_t *epochs) {
    int64_t made = 0;
    for (*epochs = 0; *epochs < num_epochs && made < num_samples; ++*epochs) {
        int64_t before = made;
        made = epoch_rows(m, usable, rng, made, 0, NULL, 0);
        if (made <= before) return made; /* a fault, or no epoch will ever have a sample */
        if (m->short_ratio == 0) {
            int64_t needed = num_samples / made + (num_samples % made != 0);
            *epochs = needed < num_epochs ? needed : num_epochs;
            return made > INT64_MAX / *epochs ? INT64_MAX : made * *epochs;
        }
    }
    return made;
}

INLINED int64_t masked_rows(const binidx_masked *m, const uint32_t *usable, binidx_mt19937 *rng, int64_t num_epochs,
                            int64_t num_rows, void *rows, int wide) {
    const int64_t row_bytes = (m->titles ? 4 : 3) * (wide ? 8 : 4);
    int64_t made = 0;
    for (int64_t epoch = 0; epoch < num_epochs; epoch++) {
        if (epoch > 0 && m->short_ratio == 0) {
            int64_t an_epoch = made / epoch;
            if (an_epoch > num_rows - made) return BINIDX_BAD_TOKENS;
            memcpy((char *)rows + made * row_bytes, rows, (size_t)(an_epoch * row_bytes));
            made += an_epoch;
        } else {
            made = epoch_rows(m, usable, rng, made, num_rows, rows, wide);
            if (made < 0) return made;
        }
    }
    return made == num_rows ? made : BINIDX_BAD_TOKENS;
}

int64_t binidx_masked_rows_4(const binidx_masked *m, const uint32_t *usable, binidx_mt19937 *rng, int64_t num_epochs,
                             int64_t num_rows, uint32_t *rows) {
    return masked_rows(m, usable, rng, num_epochs, num_rows, rows, 0);
}

int64_t binidx_masked_rows_8(const binidx_masked *m, const uint32_t *usable, binidx_mt19937 *rng, int64_t num_epochs,
                             int64_t num_rows, uint64_t *rows) {
    return masked_rows(m, usable, rng, num_epochs, num_rows, rows, 1);
}

INLINED void swap_rows(char *a, char *b, size_t bytes) {
    char held[32];
    memcpy(held, a, bytes);
    memmove(a, b, bytes); /* may be one row */
    memcpy(b, held, bytes);
}

INLINED void shuffle_rows(binidx_mt19937_64 *rng, char *rows, int64_t num_rows, size_t bytes) {
    int64_t targets[BATCH];
    for (int64_t i = num_rows - 1, count; i > 0; i -= count) {
        count = i < BATCH ? i : BATCH;
        for (int64_t k = 0; k < count; k++) targets[k] = (int64_t)(next_wide_word(rng) % (uint64_t)(i - k + 1));
        for (int64_t k = 0; k < count && k < AHEAD; k++) __builtin_prefetch(rows + targets[k] * (int64_t)bytes, 1);
        for (int64_t k = 0; k < count; k++) {
            if (k + AHEAD < count) __builtin_prefetch(rows + targets[k + AHEAD] * (int64_t)bytes, 1);
            swap_rows(rows + (i - k) * (int64_t)bytes, rows + targets[k] * (int64_t)bytes, bytes);
        }
    }
}

void binidx_shuffle_rows(binidx_mt19937_64 *rng, void *rows, int64_t num_rows, int64_t row_bytes) {
    if (row_bytes == 12) shuffle_rows(rng, rows, num_rows, 12);
    if (row_bytes == 16) shuffle_rows(rng, rows, num_rows, 16);
    if (row_bytes == 24) shuffle_rows(rng, rows, num_rows, 24);
    if (row_bytes == 32) shuffle_rows(rng, rows, num_rows, 32);
}
