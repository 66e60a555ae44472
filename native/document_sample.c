/* document_sample.c: the document index and the sample index of one shuffle, with nothing gathered.
 *
 *     documents, lengths   ->   records  {document, length}  ->  shuffled  ->  document_index, rows
 *                                        8 bytes, in order                     both in order
 *
 * The one cache miss of a shuffle step brings the length with the document, so all that stands before and behind the
 * shuffle is a stream: 24 bytes a document in all, 1 to 1.5 ns, where the gather of sample_index.c costs 3.
 * Source: ours; the shuffle's draws depend on the number of items only, so the order is NumPy's and Megatron Core's.
 */
#include "sample_rows.h"

int64_t binidx_fill_records(const binidx_samples *s, binidx_record *records, int64_t *found) {
    int64_t tokens = 0;
    for (int64_t k = 0; k < s->num_documents; k++) {
        int64_t document = s->document_index[k];
        if (document < 0 || document >= s->num_sequences) return *found = k, BINIDX_BAD_DOCUMENT;
        records[k].document = (int32_t)document;
        memcpy(&records[k].length, (const char *)s->sequence_lengths + 4 * document, 4);
        if (records[k].length < 0) return *found = k, BINIDX_BAD_LENGTH;
        tokens += records[k].length;
    }
    return tokens;
}

static inline void record_rows(const binidx_samples *s, const binidx_record *records, int64_t first, int64_t count,
                               int64_t token, int64_t num_tokens, int32_t *documents, void *rows, int wide) {
    int64_t stop = first_row_from(s, token + num_tokens), end = s->num_samples + 1, k = 0;
    row_cursor cursor = start_rows(s, rows, token, stop < end ? stop : end);
    if (first == 0) put_row(rows, wide, 0, 0, 0);
    for (; k < count && cursor.row < cursor.stop; k++) {
        documents[k] = records[k].document;
        put_document(&cursor, wide, first + k, records[k].length);
    }
    for (; k < count; k++) documents[k] = records[k].document;
}

void binidx_record_rows_4(const binidx_samples *samples, const binidx_record *records, int64_t first, int64_t count,
                          int64_t token, int64_t num_tokens, int32_t *documents, int32_t *rows) {
    record_rows(samples, records, first, count, token, num_tokens, documents, rows, 0);
}

void binidx_record_rows_8(const binidx_samples *samples, const binidx_record *records, int64_t first, int64_t count,
                          int64_t token, int64_t num_tokens, int32_t *documents, int64_t *rows) {
    record_rows(samples, records, first, count, token, num_tokens, documents, rows, 1);
}
