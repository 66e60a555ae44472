/* check_index.c: is an .idx true to its own rules?
 *
 *     lengths    3    0    5   ...       every one >= 0
 *     pointers   0    6    6   16 ...    item_bytes * (3 + 0 + 5 + ...), so the .bin is tiled without gap or overlap
 *     documents  0    2    2   3  ...    never falling, never past the last sequence
 *
 * Cost: one pass over 12 bytes a sequence and 8 bytes a document, at the speed of memory. Source: us; Megatron Core
 * trusts the file.
 */
#include "binidx.h"
#include "unaligned.h"

int64_t binidx_check_sequences(const void *lengths, const void *pointers, int64_t num_sequences, int64_t item_bytes,
                               int64_t *total_tokens) {
    int64_t tokens = 0, i = 0;
    for (; i < num_sequences; i++) {
        int32_t length = load_i32(lengths, i);
        /* No overflow: 2^31 tokens x 8 bytes x fewer than 2^29 sequences a step; the pointer check stops any run-away. */
        if (length < 0 || load_i64(pointers, i) != tokens * item_bytes) break;
        tokens += length;
    }
    *total_tokens = tokens;
    return i;
}

int64_t binidx_check_documents(const void *document_indices, int64_t count, int64_t num_sequences) {
    int64_t before = 0, i = 0;
    for (; i < count; i++) {
        int64_t bound = load_i64(document_indices, i);
        if (bound < before || bound > num_sequences) break;
        before = bound;
    }
    return i;
}
