/* binidx.h: every function of the C core.
 *
 * The caller owns every buffer. Counts are int64_t; a function returns a count >= 0 or a negative BINIDX_ code below.
 * Nothing here allocates, prints, keeps state or touches Python. Buffers named `const void *` come straight from a
 * mapped .idx, whose arrays start at byte 34 and so are not aligned: they are read by memcpy.
 */
#ifndef BINIDX_H
#define BINIDX_H
#include <stdint.h>

/* check_index.c ------------------------------------------------------------------------------------------------- */

/* The first sequence whose length is negative, or whose pointer is not item_bytes * (tokens before it); num_sequences
 * when all are right. *total_tokens is the sum of the lengths before that sequence. */
int64_t binidx_check_sequences(const void *lengths, const void *pointers, int64_t num_sequences, int64_t item_bytes,
                               int64_t *total_tokens);

/* The first of `count` document bounds that is below the one before it or above num_sequences; count when all are right. */
int64_t binidx_check_documents(const void *document_indices, int64_t count, int64_t num_sequences);

#endif
