/* binidx.h: every function of the C core.
 *
 * The caller owns every buffer. Counts are int64_t; a function returns a count >= 0 or a negative BINIDX_ code below.
 * Nothing here allocates, prints, keeps state or touches Python. Buffers named `const void *` come straight from a
 * mapped .idx, whose arrays start at byte 34 and so are not aligned: they are read by memcpy.
 */
#ifndef BINIDX_H
#define BINIDX_H
#include <stdint.h>

enum {
    BINIDX_BAD_DOCUMENT = -1, /* a document index names a sequence there is not */
    BINIDX_BAD_LENGTH = -2,   /* a sequence has fewer than 0 tokens */
    BINIDX_BAD_TOKENS = -3,   /* the documents do not hold the tokens that were counted */
    BINIDX_NOT_HERE = -4,     /* some of the bytes are not in memory; no fault */
    BINIDX_BAD_ID = -5,       /* a token id that its dtype does not hold */
};

/* cpu.c --------------------------------------------------------------------------------------------------------- */

/* Vector levels, each with all that those before it on the same processor have. A function with an `int level` runs
 * its body for that level, and gives the same result at every one. */
enum {
    BINIDX_PORTABLE = 0, /* C alone */
    BINIDX_AVX2 = 1,     /* x86-64: AVX2, BMI1, BMI2, LZCNT, POPCNT */
    BINIDX_AVX512 = 2,   /* x86-64: and AVX-512 F, BW, CD, DQ, VL */
    BINIDX_NEON = 3,     /* aarch64 */
};

/* The best level of this machine. */
int binidx_cpu_level(void);

/* check_index.c ------------------------------------------------------------------------------------------------- */

/* The first sequence whose length is negative, or whose pointer is not item_bytes * (tokens before it); num_sequences
 * when all are right. *total_tokens is the sum of the lengths before that sequence. */
int64_t binidx_check_sequences(const void *lengths, const void *pointers, int64_t num_sequences, int64_t item_bytes,
                               int64_t *total_tokens);

/* The first of `count` document bounds that is below the one before it or above num_sequences; count when all are right. */
int64_t binidx_check_documents(const void *document_indices, int64_t count, int64_t num_sequences);

/* mt19937.c ----------------------------------------------------------------------------------------------------- */

/* The Mersenne Twister as NumPy's RandomState and torch's CPU generator hold it. */
typedef struct {
    uint32_t key[624];   /* the state block: NumPy's get_state()[1] */
    uint32_t words[624]; /* its tempered outputs */
    int64_t position;    /* words drawn of this block; 624: the next draw makes a new one */
    int32_t level;       /* BINIDX_PORTABLE, BINIDX_AVX2 ...: how everything runs that draws from it */
} binidx_mt19937;

/* Knuth's initialisation from 32 bits; nothing is drawn yet (position 624). */
void binidx_mt19937_seed(binidx_mt19937 *rng, uint32_t seed, int level);

/* The next block of 624 words, position 0. */
void binidx_mt19937_next_block(binidx_mt19937 *rng);

/* shuffle_targets.c --------------------------------------------------------------------------------------------- */

/* What steps first, first-1, ... (count of them, all >= 1) of a shuffle swap with: targets[k] is in [0, first-k]. */
void binidx_shuffle_targets(binidx_mt19937 *rng, int64_t first, int64_t count, int64_t *targets);

/* shuffle.c ----------------------------------------------------------------------------------------------------- */

/* NumPy's legacy RandomState.shuffle of n items of 1, 2, 4 or 8 bytes, in place; any alignment. */
void binidx_shuffle_1(binidx_mt19937 *rng, void *data, int64_t n);
void binidx_shuffle_2(binidx_mt19937 *rng, void *data, int64_t n);
void binidx_shuffle_4(binidx_mt19937 *rng, void *data, int64_t n);
void binidx_shuffle_8(binidx_mt19937 *rng, void *data, int64_t n);

/* randperm.c ---------------------------------------------------------------------------------------------------- */

/* torch.randperm on the CPU: by its rule for n < (2^32-1)/20 (32-bit draws), and for larger n (64-bit draws). */
void binidx_randperm_32(binidx_mt19937 *rng, int64_t n, int64_t *out);
void binidx_randperm_64(binidx_mt19937 *rng, int64_t n, int64_t *out);

/* sample_index.c ------------------------------------------------------------------------------------------------ */

/* What one call reads. extra is 1 when a sample holds the first token of the next one, else 0. */
typedef struct {
    const void *sequence_lengths; /* (num_sequences,) int32, unaligned */
    int64_t num_sequences;
    const int32_t *document_index; /* (num_documents,) sequence numbers in reading order */
    int64_t num_documents;
    int64_t sequence_length;
    int64_t extra;
    int64_t num_tokens;  /* of all documents in document_index */
    int64_t num_samples; /* ceil or floor of (num_tokens - extra) / sequence_length, 0 where that is negative */
} binidx_samples;

/* Where each sample starts, num_samples + 1 rows of (position in document_index, token offset): int32 or int64 rows.
 * Returns the number of rows, or
 *   BINIDX_BAD_DOCUMENT, BINIDX_BAD_LENGTH   *found is the position in document_index;
 *   BINIDX_BAD_TOKENS                        *found is how many tokens the documents hold. */
int64_t binidx_sample_index_4(const binidx_samples *samples, int32_t *rows, int64_t *found);
int64_t binidx_sample_index_8(const binidx_samples *samples, int64_t *rows, int64_t *found);

/* The same by parts, for threads. Lengths of the documents [first, first + count) into `lengths` (count,), or nowhere
 * where it is NULL; returns their sum, or BINIDX_BAD_DOCUMENT or BINIDX_BAD_LENGTH with the position in *found. */
int64_t binidx_gather_lengths(const binidx_samples *samples, int64_t first, int64_t count, int32_t *lengths,
                              int64_t *found);

/* The rows that documents [first, first + count) decide: those whose sample before ends in one of them, and row 0 where
 * first is 0. `token` tokens stand before document first, `num_tokens` in these; no other row is written. */
void binidx_sample_rows_4(const binidx_samples *samples, const int32_t *lengths, int64_t first, int64_t count,
                          int64_t token, int64_t num_tokens, int32_t *rows);
void binidx_sample_rows_8(const binidx_samples *samples, const int32_t *lengths, int64_t first, int64_t count,
                          int64_t token, int64_t num_tokens, int64_t *rows);

/* The end of a last sample cut short, where there is one: after all other rows. 0, or BINIDX_BAD_TOKENS where the
 * tokens that were counted do not reach that sample. */
int64_t binidx_sample_end_4(const binidx_samples *samples, int32_t *rows);
int64_t binidx_sample_end_8(const binidx_samples *samples, int64_t *rows);

/* blend_index.c ------------------------------------------------------------------------------------------------- */

/* For each of `size` samples the dataset it is drawn from, and which of that dataset's samples it is, so that dataset d
 * gets weights[d] of every prefix. counts (num_datasets,) is scratch: at the end, the samples drawn from each. */
void binidx_blend_weighted(const double *weights, int64_t num_datasets, int64_t size, double *counts,
                           int16_t *dataset_index, int64_t *dataset_sample_index);

/* The same with weights sizes[d] / total until dataset d has given all its sizes[d] samples. Both outputs hold total =
 * sum of sizes entries. weights, counts (double) and open (int16), each (num_datasets,), are scratch. */
void binidx_blend_exhaustive(const int64_t *sizes, int64_t num_datasets, int64_t total, double *weights, double *counts,
                             int16_t *open, int16_t *dataset_index, int64_t *dataset_sample_index);

/* blend_chunks.c ------------------------------------------------------------------------------------------------ */

/* A blend whose rows are drawn in any order of chunks. The counts of a chunk are `width` doubles, the samples drawn from
 * each dataset before its first row: infinite for a dataset that is spent and for those that only fill up the width. */
typedef struct {
    const double *weights;  /* (width,), 0 after the last dataset */
    const double *limits;   /* (width,) samples that a dataset has; NULL: there is no end */
    int64_t num_datasets;
    int64_t width;          /* num_datasets rounded up to a multiple of 16 */
    int16_t *dataset_index; /* (size,) both */
    int64_t *dataset_sample_index;
} binidx_blend;

/* How many chunks one call draws side by side. */
int64_t binidx_blend_lanes(int level);

/* Draw that many chunks of `length` rows, the first from row `first` on, each from its counts, shape (lanes, width); these
 * become the counts after it. */
void binidx_blend_chunks(const binidx_blend *blend, int level, int64_t first, int64_t length, double *counts);

/* Draw rows first .. stop - 1 from the true counts, until they are those that the rows already there have come to from
 * `guess`, their counts at row first (NULL: to the end). Both are moved on; returns how many rows were drawn. */
int64_t binidx_blend_replay(const binidx_blend *blend, int level, int64_t first, int64_t stop, double *counts,
                            double *guess);

/* mt19937_64.c -------------------------------------------------------------------------------------------------- */

/* C++'s std::mt19937_64. */
typedef struct {
    uint64_t key[312], words[312]; /* the state block, and its tempered outputs */
    int64_t position;              /* words drawn of this block; 312: the next draw makes a new one */
} binidx_mt19937_64;

void binidx_mt19937_64_seed(binidx_mt19937_64 *rng, uint64_t seed);

/* The next block of 312 words, position 0. */
void binidx_mt19937_64_next_block(binidx_mt19937_64 *rng);

/* masked_mapping.c ---------------------------------------------------------------------------------------------- */

/* Documents of sequences, and how samples are cut from them. */
typedef struct {
    const void *documents;        /* (num_documents + 1,) int64, first sequence of each and the end; unaligned */
    const void *sequence_lengths; /* (num_sequences,) int32, unaligned */
    const int32_t *titles;        /* (num_documents,) tokens of each one's title: blocks; NULL: masked samples */
    int64_t num_documents, num_sequences;
    int64_t sequence_length; /* tokens that a sample aims at, at least 2 */
    int64_t short_ratio;     /* one in so many aims at fewer; 0: none, as for blocks */
    int64_t least;           /* sequences of a sample, at least 1 */
} binidx_masked;

/* usable[d]: 0 where document d has no samples, else its tokens and 1, or 2^32 - 1 where they are not known. Returns how
 * many have samples. counts: those without sequences, with one, and with one that is too long. BINIDX_BAD_DOCUMENT, and
 * which in counts[0], where bounds fall or leave the sequences. */
int64_t binidx_usable_documents(const binidx_masked *m, uint32_t *usable, int64_t *counts);

/* The samples of as many whole epochs as give num_samples, num_epochs at most and *epochs in fact; or a code. */
int64_t binidx_count_masked(const binidx_masked *m, const uint32_t *usable, binidx_mt19937 *rng, int64_t num_epochs,
                            int64_t num_samples, int64_t *epochs);

/* (first sequence, end, tokens aimed at) of each sample of so many epochs, in order; of a block (first sequence, end,
 * document, block of the epoch). rng is seeded as for the count. num_rows, or a code where there are not so many. */
int64_t binidx_masked_rows_4(const binidx_masked *m, const uint32_t *usable, binidx_mt19937 *rng, int64_t num_epochs,
                             int64_t num_rows, uint32_t *rows);
int64_t binidx_masked_rows_8(const binidx_masked *m, const uint32_t *usable, binidx_mt19937 *rng, int64_t num_epochs,
                             int64_t num_rows, uint64_t *rows);

/* Rows of 12, 16, 24 or 32 bytes, from the last down, each swapped with a word mod the rows up to it. */
void binidx_shuffle_rows(binidx_mt19937_64 *rng, void *rows, int64_t num_rows, int64_t row_bytes);

/* locate.c ------------------------------------------------------------------------------------------------------ */

/* Where the sequences of a .bin lie. */
typedef struct {
    const void *lengths, *pointers; /* (num_sequences,) int32_t and int64_t, as mapped */
    int64_t num_sequences, item_bytes;
    int32_t dtype; /* of the tokens, the code of an .idx */
} binidx_sequences;

/* The orders of a GPT dataset over its sequences. */
typedef struct {
    binidx_sequences sequences;
    const void *shuffle_index; /* (num_served,) uint32_t, or int64_t when wide_shuffle */
    const void *sample_index;  /* (num_samples + 1, 2) int32_t, or int64_t when wide_rows */
    const int32_t *document_index;
    int64_t num_served, num_samples, num_documents;
    int32_t wide_shuffle, wide_rows, extra;
} binidx_orders;

/* The row of sample_index of each sample served, -1 being the last one; returns the first that there is not, or count. */
int64_t binidx_served_rows(const binidx_orders *orders, const int64_t *served, int64_t count, int64_t *rows);

/* bounds[s] .. bounds[s+1] are the spans of the sample at rows[s]; returns how many there are in all. */
int64_t binidx_count_spans(const binidx_orders *orders, const int64_t *rows, int64_t num_samples, int64_t *bounds);

/* (sequence, first token, tokens) of each span, for rows that binidx_count_spans has counted; returns how many. */
int64_t binidx_sample_spans(const binidx_orders *orders, const int64_t *rows, int64_t num_samples, int64_t *spans);

/* The same without looking at a sequence: those of each sample, at bounds[s] .. bounds[s+1] as binidx_count_spans has
 * them, its first token in the first of them, and one after its last token in the last. */
void binidx_sample_ends(const binidx_orders *orders, const int64_t *rows, int64_t num_samples, const int64_t *bounds,
                        int32_t *sequences, int32_t *starts, int32_t *stops);

/* (first byte, end) of each span in the .bin, sequence -1 being the last one; returns the first span that leaves its
 * sequence, or num_spans. */
int64_t binidx_locate_spans(const binidx_sequences *sequences, const int64_t *spans, int64_t num_spans, int64_t *ranges);

/* read_ahead.c -------------------------------------------------------------------------------------------------- */

/* Advise that the ranges, (first byte, end) in a mapping of `size` bytes at `base`, will be read soon; their bytes in all,
 * or BINIDX_BAD_LENGTH, and no advice, if one leaves the mapping. No advice either with page_bytes 0. */
int64_t binidx_read_ahead(int64_t base, int64_t size, const int64_t *ranges, int64_t num_ranges, int64_t page_bytes);

/* What this thread has had of the disk, in no unit; it rises with each page. -1 where the system does not tell. */
int64_t binidx_disk_reads(void);

/* place.c ------------------------------------------------------------------------------------------------------- */

/* A file in blocks of whole chunks, of which some are mapped. */
typedef struct {
    const uint8_t *good;      /* chunk -> not 0: its bytes are there, and right */
    const int64_t *addresses; /* block -> where its first byte is; 0: not mapped */
    int64_t *used;            /* block -> the last tick at which it was read */
    int64_t size, chunk_bytes, block_bytes, tick;
} binidx_blocks;

/* The addresses of ranges, (first byte, end), as such; returns how many chunks they are. BINIDX_NOT_HERE, and `places` of
 * no use, unless each range lies in one block of the file, and all of its chunks are good. `places` may be `ranges`. */
int64_t binidx_place_ranges(const binidx_blocks *b, const int64_t *ranges, int64_t num_ranges, int64_t *places);

/* copy_pieces.c ------------------------------------------------------------------------------------------------- */

/* Pieces order[0], order[1], ... of `from`, one after another in `to`; returns their bytes. Piece p is
 * [bounds[p], bounds[p + 1]). BINIDX_BAD_DOCUMENT if there is no such piece, BINIDX_BAD_LENGTH if its bounds lead outside,
 * BINIDX_BAD_TOKENS if there is no room for it: those before it are in `to`. */
int64_t binidx_copy_pieces(const uint8_t *from, int64_t size, const int64_t *bounds, int64_t num_pieces,
                           const int64_t *order, int64_t count, uint8_t *to, int64_t room);

/* gather.c ------------------------------------------------------------------------------------------------------ */

/* Where positions start again from 0. */
enum {
    BINIDX_EACH_SAMPLE = 0,
    BINIDX_AFTER_EOD = 1,
    BINIDX_EACH_PIECE = 2, /* and at the bounds in cu_seqlens */
};

/* Pieces of stored tokens, and where their samples go. Of the outputs there is either `text` or all others but
 * cu_seqlens and max_seqlen, which come where positions are BINIDX_EACH_PIECE. */
typedef struct {
    int64_t base;          /* address that the ranges count from; 0 when they are addresses */
    const int64_t *ranges; /* piece -> (first byte, end) */
    const int64_t *bounds; /* sample -> its first piece; num_samples + 1 of them */
    const int64_t *rows;   /* sample -> row of the outputs */
    int64_t num_samples, num_pieces, num_rows, sequence_length, item_bytes, pad, eod;
    int32_t dtype;    /* code of an .idx */
    int32_t extra;    /* 1 when a whole sample has a token more than the row */
    int32_t mask_eod; /* no loss on an EOD */
    int32_t mask_ends; /* no loss on the last token of a piece, whose label is of another document */
    int32_t starts;   /* of positions: BINIDX_EACH_SAMPLE ... */
    int64_t *tokens, *labels, *positions; /* (rows, sequence_length) */
    float *loss_mask;
    int32_t *cu_seqlens; /* (rows, sequence_length + 1) where each piece starts, then sequence_length */
    int32_t *max_seqlen; /* (rows,) tokens of the longest */
    int32_t *text;       /* (rows, sequence_length + 1) tokens and the one after, pads as they are */
} binidx_gather;

/* Fill the rows of the outputs; returns num_samples. A code, and nothing written: BINIDX_BAD_TOKENS if a sample is longer
 * than a row and its extra token, BINIDX_BAD_LENGTH if a range is not whole tokens, BINIDX_BAD_DOCUMENT if bounds or rows lead outside. */
int64_t binidx_gather_samples(const binidx_gather *gather, int level);

/* read_samples.c ------------------------------------------------------------------------------------------------ */

/* A mapped .bin, as a whole, or in blocks: then base is 0 and size no bound, and not all of it need be here. */
typedef struct {
    int64_t base, size;
    int64_t page_bytes;         /* 0: no disk stands behind it */
    int32_t ask_ahead;          /* whether the disk is asked for all the ranges first */
    int32_t disk_moved;         /* out: whether it was read for this, or there is no telling */
    int64_t num_bytes;          /* out: bytes of tokens */
    const binidx_blocks *blocks;
    int64_t num_chunks;         /* out: of blocks, that the tokens lie in */
} binidx_mapping;

/* From spans, those of gather->bounds, to filled rows; `ranges` has room for 2 * num_spans items. Returns num_spans, or a
 * code: something is out of bounds, or BINIDX_NOT_HERE. */
int64_t binidx_read_spans(const binidx_sequences *sequences, const int64_t *spans, int64_t num_spans,
                          binidx_mapping *mapping, binidx_gather *gather, int64_t *ranges, int level);

/* All of the above for the samples served under these numbers: the pieces that `gather` has no need to name. Returns the
 * pieces that they have; when those are more than `room`, nothing was written and it wants scratch for so many:
 * 2 * num_samples + 1 + 5 * room items. A code: something is out of bounds, or BINIDX_NOT_HERE. */
int64_t binidx_read_samples(const binidx_orders *orders, const int64_t *served, binidx_mapping *mapping,
                            binidx_gather *gather, int64_t *scratch, int64_t room, int level);

/* wrap_rows.c --------------------------------------------------------------------------------------------------- */

/* Rows of token ids, and what is put before and behind each. */
typedef struct {
    const uint32_t *ids;    /* of all rows, num_ids */
    const int64_t *offsets; /* num_rows + 1, rising, within ids */
    const uint32_t *prefix;
    const uint32_t *suffix;
    void *out; /* room for `room` tokens of item_bytes */
    int64_t num_ids;
    int64_t num_rows;
    int64_t num_prefix;
    int64_t num_suffix;
    int64_t room;
    uint32_t largest;   /* 2^n - 1: the largest id that the stored dtype holds */
    int32_t item_bytes; /* 2 or 4 */
    int32_t empty_too;  /* rows of no ids get prefix and suffix as well */
} binidx_wrapping;

/* Fill `out`; the tokens written. BINIDX_BAD_DOCUMENT: offsets fall or lead outside; BINIDX_BAD_TOKENS: no room;
 * BINIDX_BAD_ID: `out` is filled, and an id was larger than `largest`. */
int64_t binidx_wrap_rows(const binidx_wrapping *wrapping);

/* best_fit.c ---------------------------------------------------------------------------------------------------- */

/* Pieces of documents, and the bins that they are put into. All but the first three are the caller's to give room for. */
typedef struct {
    const int32_t *lengths; /* 1 to capacity each */
    int64_t num_pieces;
    int64_t capacity;       /* tokens of a bin */
    int64_t *pieces;        /* (num_pieces,) out: numbers of the pieces, bin by bin */
    int64_t *bounds;        /* (num_pieces + 1,) out: where each bin begins in it, then the end */
    int64_t *bin_of;        /* (num_pieces,) scratch */
    int64_t *next;          /* (num_pieces,) scratch of best fit */
    int64_t *heads;         /* (capacity + 1,) scratch of best fit */
    uint64_t *open;         /* (capacity / 64 + 1,) scratch of best fit */
    int32_t *rooms;         /* (binidx_first_fit_nodes(num_pieces),) scratch of first fit, all 0 */
} binidx_packing;

/* Returns the number of bins; BINIDX_BAD_LENGTH: a length is outside, and nothing was put anywhere. */
int64_t binidx_best_fit(const binidx_packing *packing);

/* first_fit.c --------------------------------------------------------------------------------------------------- */

int64_t binidx_first_fit_nodes(int64_t num_pieces);

/* Returns the number of bins; BINIDX_BAD_LENGTH: a length is outside, and nothing was put anywhere. */
int64_t binidx_first_fit(const binidx_packing *packing);

/* find_patterns.c ----------------------------------------------------------------------------------------------- */

/* Patterns to look for. Lengths, window and block are bytes, in whole symbols of `unit` bytes: 1 for text, that of a token
 * for tokens. */
typedef struct {
    const uint8_t *bytes;  /* of all patterns, one after another */
    const int64_t *bounds; /* (num_patterns + 1,) */
    int64_t num_patterns;  /* below 2^31 */
    int64_t unit;
    int64_t longest; /* the longest of the patterns */
    int64_t window;  /* at most the shortest of them */
    int64_t block;   /* at most the window: 1 to 8, or 16 */
    int64_t stride;  /* symbols from one sample to the next, with which a block still fits into the window */
    int64_t bits;    /* 3 to 32 */
    int64_t head_bits; /* 1 to 31 */
    uint8_t *sampled, *ends; /* (1 << bits - 3,) scratch, as the next two: a bit for the hash of each block that ends in
                                the last `stride` symbols of a pattern's window, and that ends with it */
    int32_t *heads;  /* (1 << head_bits,) hash of a window -> first pattern that begins with it; -1: none */
    int32_t *next;   /* (num_patterns,) pattern -> the next one of the same hash; -1: none */
} binidx_patterns;

/* Fill the scratch; the number of patterns. BINIDX_BAD_LENGTH: one is shorter than the window. */
int64_t binidx_index_patterns(const binidx_patterns *patterns);

/* The first place >= `at` >= window where a window ends that a pattern may begin with, and in *pattern the first of these
 * patterns; a number above size if there is none. */
int64_t binidx_next_window(const binidx_patterns *patterns, const uint8_t *text, int64_t size, int64_t at,
                           int64_t *pattern);

/* fold_text.c --------------------------------------------------------------------------------------------------- */

/* How characters are folded, and the end of the text so far; a new text begins with num_part = blank = 0. */
typedef struct {
    const int32_t *pages; /* (0x1100,) row in folds of 256 code points */
    const int32_t *folds; /* (rows, 256) where in bytes the fold of a code point stands, its length before it; -1: it stays */
    const uint8_t *bytes;
    uint8_t part[4];         /* the bytes of a character that has not ended */
    int64_t num_part, blank; /* blank: 1 after a blank, which the next ones join */
} binidx_folding;

/* Fold the text that follows. Returns the number of bytes: for each byte of text, and of `part`, at most the longest fold,
 * or one. They are written to `folded`, and the byte of `text` at which the character of each begins to `origins`, unless
 * these are NULL. */
int64_t binidx_fold_text(binidx_folding *folding, const uint8_t *text, int64_t size, uint8_t *folded, int64_t *origins);

/* scan_tokens.c ------------------------------------------------------------------------------------------------- */

/* A search through documents, one call after the other. */
typedef struct {
    const binidx_patterns *patterns;
    const uint8_t *bytes;   /* of all tokens by their ids, and 16 more; NULL: the stored tokens are searched */
    const int32_t *offsets; /* (vocab_size + 1,) into bytes, rising */
    int64_t vocab_size, longest_token, item_bytes;
    binidx_folding *folding;       /* NULL: the text is searched as it is */
    const uint8_t *folded;         /* of all tokens, folded each by itself, and 16 more */
    const int32_t *folded_offsets; /* (vocab_size + 1,) into folded, rising */
    const uint8_t *kinds; /* (vocab_size,) of a folded token: 1 it begins with a blank, 2 it ends with one, 4 it is empty, 8
                             the token ends within a character */
    uint8_t *text; /* (room,) scratch: for the longest pattern, the longest token and 16 bytes at least */
    int64_t room;
    int64_t held, before; /* of the document that goes on: bytes of its (folded) text at the start of `text`, and before */
    int64_t *hits;        /* (room_hits, 4) out: (document, pattern, matches, first byte in its (folded) text) */
    int64_t num_hits, room_hits; /* the caller empties hits by num_hits = 0; room for as many as patterns at least */
    int64_t *rows;      /* (num_patterns,) scratch */
    int64_t bad_token;  /* out: of BINIDX_BAD_ID, which token */
} binidx_scan;

/* Search documents [bounds[d], bounds[d + 1]) of `tokens`, numbered from 0 in hits. The first one goes on from the last call
 * if that was `open`: its last document had not ended. Returns how many were searched, fewer than count when hits are to be
 * emptied first; or BINIDX_BAD_ID. */
int64_t binidx_scan_documents(binidx_scan *scan, const void *tokens, const int64_t *bounds, int64_t count, int open);

/* slots.c ------------------------------------------------------------------------------------------------------- */

/* Take a slot of memory that processes share; 0 if it is taken. */
int binidx_take_slot(int64_t *state);

/* Give a slot back, after all reads of it. */
void binidx_give_slot(int64_t *state);

#endif
