/* document_sample.c: the document index and the sample index of one shuffle, with nothing gathered.
 *
 *     documents, lengths   ->   records {document, length}  ->  shuffled, from the last down  ->  documents, rows
 *                               8 bytes, in order
 *
 * The one cache miss of a shuffle step brings the length with the document. What step i puts at place i stays there, so
 * it goes straight to the outputs, and the rows are made from the end of the stream down while the next lines are on
 * their way.
 * Cost at 10^8: 0.6 ns a document for the records, 4 ns for the rest, of which 3.3 are the shuffle's alone; then the
 * gather of sample_index.c would cost 3 more.
 * Source: ours; the draws depend on the number of items only, so the order is NumPy's and Megatron Core's.
 */
#include "sample_rows.h"
#include "shuffle_targets.h"

enum { BATCH = 4096, AHEAD = 192 };

int64_t binidx_fill_records(const binidx_samples *s, binidx_record *records, int64_t *found) {
    int64_t tokens = 0;
    for (int64_t k = 0; k < s->num_documents; k++) {
        int64_t document = s->document_index[k];
        if (document < 0 || document >= s->num_sequences) return *found = k, BINIDX_BAD_DOCUMENT;
        records[k].document = (int32_t)document;
        records[k].length = load_i32(s->sequence_lengths, document);
        if (records[k].length < 0) return *found = k, BINIDX_BAD_LENGTH;
        tokens += records[k].length;
    }
    return tokens;
}

static inline void put_record(row_cursor *c, int wide, binidx_record record, int64_t first, int64_t k,
                              int32_t *documents) {
    documents[k] = record.document;
    put_document_down(c, wide, first + k, record.length);
}

/* Steps i, i-1, ... of a shuffle, `count` of them. */
static inline void steps(binidx_record *x, int64_t i, int64_t count, const uint32_t *targets, row_cursor *c, int wide,
                         int64_t first, int32_t *documents) {
    for (int64_t k = 0; k < count && k < AHEAD; k++) __builtin_prefetch(x + targets[k], 1);
    for (int64_t k = 0; k < count; k++, i--) {
        if (k + AHEAD < count) __builtin_prefetch(x + targets[k + AHEAD], 1);
        binidx_record record = x[targets[k]];
        x[targets[k]] = x[i];
        put_record(c, wide, record, first, i, documents);
    }
}

static inline void shuffle_records(const binidx_samples *s, binidx_mt19937 *rng, binidx_record *records, int64_t first,
                                   int64_t count, int64_t token, int64_t num_tokens, int32_t *documents, void *rows,
                                   int wide) {
    uint32_t targets[BATCH];
    row_cursor cursor = start_rows_down(s, rows, token, token + num_tokens);
    for (int64_t i = count - 1, made; i > 0; i -= made) {
        made = binidx_some_targets(rng, (uint32_t)i, i, BATCH, targets);
        steps(records, i, made, targets, &cursor, wide, first, documents);
    }
    if (count) put_record(&cursor, wide, records[0], first, 0, documents);
    if (first == 0) put_row(rows, wide, 0, 0, 0);
}

void binidx_shuffle_records_4(const binidx_samples *samples, binidx_mt19937 *rng, binidx_record *records, int64_t first,
                              int64_t count, int64_t token, int64_t num_tokens, int32_t *documents, int32_t *rows) {
    shuffle_records(samples, rng, records, first, count, token, num_tokens, documents, rows, 0);
}

void binidx_shuffle_records_8(const binidx_samples *samples, binidx_mt19937 *rng, binidx_record *records, int64_t first,
                              int64_t count, int64_t token, int64_t num_tokens, int32_t *documents, int64_t *rows) {
    shuffle_records(samples, rng, records, first, count, token, num_tokens, documents, rows, 1);
}
