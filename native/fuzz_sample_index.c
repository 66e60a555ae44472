/* fuzz_sample_index.c: rows of any lengths, documents and counts, at once and by parts, against their definition.
 *
 * Input: flags 1, sequence length 3, samples 2, tokens 2, sequences 1, documents 1, cut 1, then a length of 1 or 4 bytes
 * for each sequence and a number of 1 byte for each document; missing bytes are 0. Flags: 1 extra token, 2 the counts
 * are the right ones, 4 with a last sample cut short, 8 lengths of 4 bytes, 16 documents not to be there, 32 half
 * of the samples.
 */
#include "binidx.h"
#include "fuzz.h"

enum { MOST_ROWS = 2048 };

static int64_t length_of(const binidx_samples *s, int64_t position) {
    int32_t length;
    memcpy(&length, (const char *)s->sequence_lengths + 4 * s->document_index[position], 4);
    return length;
}

/* What is wrong with the documents, and where; else 0 and their tokens. */
static int64_t plain_check(const binidx_samples *s, int64_t *found) {
    int64_t tokens = 0;
    for (*found = 0; *found < s->num_documents; ++*found) {
        int64_t document = s->document_index[*found];
        if (document < 0 || document >= s->num_sequences) return BINIDX_BAD_DOCUMENT;
        if (length_of(s, *found) < 0) return BINIDX_BAD_LENGTH;
        tokens += length_of(s, *found);
    }
    *found = tokens;
    return 0;
}

/* Row j of the definition, by walking all documents. 0: there is no such place. */
static int plain_row(const binidx_samples *s, int64_t row, int64_t *out) {
    int64_t last = row * s->sequence_length + s->extra - 1, position = 0;
    out[0] = out[1] = 0;
    if (row == 0) return 1;
    if (last >= s->num_tokens) {
        int64_t is_cut = last - s->sequence_length < s->num_tokens && s->num_tokens > s->extra;
        for (position = s->num_documents - 1; is_cut && length_of(s, position) < s->extra;) position--;
        out[0] = position, out[1] = is_cut ? length_of(s, position) - s->extra : 0;
        return (int)is_cut;
    }
    for (; last >= length_of(s, position); position++) last -= length_of(s, position);
    out[0] = position, out[1] = last + 1 - s->extra;
    return 1;
}

static void check_rows(const binidx_samples *s, const int32_t *narrow, const int64_t *wide) {
    for (int64_t row = 0; row <= s->num_samples; row++) {
        int64_t needed[2];
        same(plain_row(s, row, needed));
        same(narrow[2 * row] == needed[0] && narrow[2 * row + 1] == (int32_t)needed[1]);
        same(memcmp(wide + 2 * row, needed, sizeof needed) == 0);
    }
}

static int64_t at_once(const binidx_samples *s, int32_t *narrow, int64_t *wide) {
    int64_t found[2], code = binidx_sample_index_4(s, narrow, found);
    same(code == binidx_sample_index_8(s, wide, found + 1) && found[0] == found[1]);
    int64_t needed_found, needed = plain_check(s, &needed_found), ignored[2];
    same(found[0] == needed_found);
    int reached = !needed && needed_found == s->num_tokens && plain_row(s, s->num_samples, ignored);
    same(code == (needed ? needed : reached ? s->num_samples + 1 : BINIDX_BAD_TOKENS));
    return code;
}

/* The second part first: they need nothing of each other but the sum. */
static void by_parts(const binidx_samples *s, int64_t cut, int32_t *narrow, int64_t *wide) {
    int64_t found, firsts[] = {0, cut, s->num_documents}, tokens[2];
    int32_t *lengths[2];
    for (int p = 0; p < 2; p++) {
        lengths[p] = bytes_of(4 * (firsts[p + 1] - firsts[p]));
        tokens[p] = binidx_gather_lengths(s, firsts[p], firsts[p + 1] - firsts[p], lengths[p], &found);
    }
    for (int p = 1; p >= 0; p--) {
        int64_t count = firsts[p + 1] - firsts[p], token = p ? tokens[0] : 0;
        binidx_sample_rows_4(s, lengths[p], firsts[p], count, token, tokens[p], narrow);
        binidx_sample_rows_8(s, lengths[p], firsts[p], count, token, tokens[p], wide);
        free(lengths[p]);
    }
    same(binidx_sample_end_4(s, narrow) == 0 && binidx_sample_end_8(s, wide) == 0);
}

static void check(const binidx_samples *s, int64_t cut) {
    int64_t num = s->num_samples + 1;
    int32_t *narrow = bytes_of(8 * num);
    int64_t *wide = bytes_of(16 * num);
    if (at_once(s, narrow, wide) > 0) {
        check_rows(s, narrow, wide);
        note(wide, 16 * num);
        memset(narrow, 0xa5, 8 * (size_t)num), memset(wide, 0xa5, 16 * (size_t)num);
        by_parts(s, cut, narrow, wide);
        check_rows(s, narrow, wide);
    }
    free(narrow), free(wide);
}

/* The counts as Python makes them, of no more rows than MOST_ROWS, or half of them. */
static void count_right(binidx_samples *s, int64_t flags) {
    if (plain_check(s, &s->num_tokens)) return;
    if (s->num_tokens / MOST_ROWS >= s->sequence_length) s->sequence_length = s->num_tokens / MOST_ROWS + 1;
    int64_t tokens = s->num_tokens > s->extra ? s->num_tokens - s->extra : 0;
    s->num_samples = (tokens + (flags & 4 ? s->sequence_length - 1 : 0)) / s->sequence_length;
    if (flags & 32) s->num_samples /= 2;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    int64_t flags = next(&in, 1), length = next(&in, 3) + 1, num_samples = next(&in, 2) % MOST_ROWS;
    int64_t tokens = next(&in, 2), num_sequences = next(&in, 1), num_documents = next(&in, 1), cut = next(&in, 1);
    if (num_sequences == 0 && !(flags & 16)) num_documents = 0;
    char *raw = bytes_of(1 + 4 * num_sequences); /* lengths lie unaligned */
    int32_t *documents = bytes_of(4 * num_documents);
    for (int64_t k = 0; k < num_sequences; k++) {
        int32_t item = (int32_t)(flags & 8 ? next(&in, 4) : next(&in, 1));
        memcpy(raw + 1 + 4 * k, &item, 4);
    }
    for (int64_t k = 0; k < num_documents; k++)
        documents[k] = (int32_t)(flags & 16 ? next(&in, 1) - 1 : next(&in, 1) % num_sequences);
    if (!(flags & 8)) length = length % 400 + 1;
    binidx_samples samples = {raw + 1, num_sequences, documents, num_documents, length, flags & 1, tokens, num_samples};
    if (flags & 2) count_right(&samples, flags);
    check(&samples, num_documents ? cut % (num_documents + 1) : 0);
    free(raw), free(documents);
    return 0;
}
