/* test_native.c: the smallest cases by hand, built with ASan and UBSan by check.sh.
 *
 * Every buffer is the heap's and exactly as long as its contents, so that one item too many is seen. Larger cases are
 * compared with NumPy, torch and Megatron Core in tests/. Exit 0: all held; 1: the failed lines are on stderr.
 */
#include "mt19937.h"
#include "mt19937_64.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define CHECK(claim)                                                                                                   \
    do {                                                                                                               \
        if (!(claim)) failures++, fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #claim);                          \
    } while (0)

/* A heap copy of `bytes`, or fresh memory when `from` is NULL. */
static void *heap(const void *from, size_t bytes) {
    void *copy = malloc(bytes ? bytes : 1);
    if (!copy) abort();
    if (from) memcpy(copy, from, bytes);
    return copy;
}

static void test_check_index(void) {
    int32_t lengths[] = {3, 0, 5};
    int64_t pointers[] = {0, 6, 6}, documents[] = {0, 2, 2, 3}, tokens;
    CHECK(binidx_check_sequences(lengths, pointers, 3, 2, &tokens) == 3 && tokens == 8);
    CHECK(binidx_check_sequences(lengths, pointers, 0, 2, &tokens) == 0 && tokens == 0);
    pointers[2] = 8;
    CHECK(binidx_check_sequences(lengths, pointers, 3, 2, &tokens) == 2 && tokens == 3);
    lengths[1] = -1;
    CHECK(binidx_check_sequences(lengths, pointers, 3, 2, &tokens) == 1 && tokens == 3);
    CHECK(binidx_check_documents(documents, 4, 3) == 4);
    CHECK(binidx_check_documents(documents, 4, 2) == 3);
    documents[2] = 1;
    CHECK(binidx_check_documents(documents, 4, 3) == 2);
}

/* The words every mt19937 gives for seed 5489: the first, and by the C++ standard the ten-thousandth. */
static void test_mt19937_is_the_standard_one(void) {
    binidx_mt19937 *rng = heap(NULL, sizeof *rng);
    binidx_mt19937_seed(rng, 5489, BINIDX_PORTABLE);
    CHECK(rng->position == 624);
    CHECK(next_word(rng) == 3499211612u && rng->position == 1);
    for (int i = 1; i < 9999; i++) next_word(rng);
    CHECK(next_word(rng) == 4123659995u);
    binidx_mt19937_seed(rng, 5489, BINIDX_PORTABLE);
    CHECK(next_two_words(rng) == ((uint64_t)3499211612u << 32 | 581869302u));
    free(rng);
}

static void test_shuffles_of_0_1_and_some_more(void) {
    binidx_mt19937 *rng = heap(NULL, sizeof *rng);
    binidx_mt19937_seed(rng, 0, BINIDX_PORTABLE);
    binidx_shuffle_4(rng, NULL, 0);
    uint32_t *one = heap(&(uint32_t){7}, 4);
    binidx_shuffle_4(rng, one, 1);
    CHECK(one[0] == 7 && rng->position == 624); /* nothing was drawn */
    free(one);
    for (int64_t n = 2; n < 30000; n = n * 3 / 2 + 1) {
        uint32_t *four = heap(NULL, 4 * (size_t)n);
        uint64_t *eight = heap(NULL, 8 * (size_t)n);
        unsigned char *seen = calloc((size_t)n, 1);
        for (int64_t i = 0; i < n; i++) four[i] = (uint32_t)i, eight[i] = (uint64_t)i;
        binidx_mt19937_seed(rng, (uint32_t)n, binidx_cpu_level());
        binidx_shuffle_4(rng, four, n);
        binidx_mt19937_seed(rng, (uint32_t)n, BINIDX_PORTABLE);
        binidx_shuffle_8(rng, eight, n);
        for (int64_t i = 0; i < n; i++) CHECK(four[i] == eight[i] && four[i] < n && !seen[four[i]]++);
        free(four), free(eight), free(seen);
    }
    free(rng);
}

/* What numpy.random.RandomState(0).shuffle and torch.Generator().manual_seed(0) make of 0 .. 9. */
static void test_orders_of_seed_0(void) {
    uint32_t needed[] = {2, 8, 4, 9, 1, 6, 7, 3, 0, 5}, *four = heap((uint32_t[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 40);
    int64_t torch_32[] = {4, 1, 7, 5, 3, 9, 0, 8, 6, 2}, torch_64[] = {8, 2, 6, 3, 5, 1, 0, 9, 7, 4};
    int64_t *eight = heap(NULL, 80);
    binidx_mt19937 *rng = heap(NULL, sizeof *rng);
    binidx_mt19937_seed(rng, 0, BINIDX_PORTABLE);
    binidx_shuffle_4(rng, four, 10);
    CHECK(memcmp(four, needed, 40) == 0);
    binidx_mt19937_seed(rng, 0, BINIDX_PORTABLE);
    binidx_randperm_32(rng, 10, eight);
    CHECK(memcmp(eight, torch_32, 80) == 0);
    binidx_mt19937_seed(rng, 0, BINIDX_PORTABLE);
    binidx_randperm_64(rng, 10, eight);
    CHECK(memcmp(eight, torch_64, 80) == 0);
    free(four), free(eight), free(rng);
}

static void test_targets_are_within_their_step(void) {
    binidx_mt19937 *rng = heap(NULL, sizeof *rng);
    int64_t count = 3000, *targets = heap(NULL, 8 * (size_t)count);
    int64_t firsts[] = {3000, 4096, 0xffffffff, 0x100000000 + 1500, (int64_t)1 << 40};
    for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++) {
        binidx_mt19937_seed(rng, 0xffffffff, BINIDX_PORTABLE);
        binidx_shuffle_targets(rng, firsts[f], count, targets);
        for (int64_t k = 0; k < count; k++) CHECK(targets[k] >= 0 && targets[k] <= firsts[f] - k);
    }
    free(targets), free(rng);
}

static void test_randperm_is_a_permutation(void) {
    binidx_mt19937 *rng = heap(NULL, sizeof *rng);
    for (int64_t n = 0; n < 3000; n = n * 2 + 1)
        for (int wide = 0; wide < 2; wide++) {
            int64_t *out = heap(NULL, 8 * (size_t)n);
            unsigned char *seen = calloc((size_t)n + 1, 1);
            binidx_mt19937_seed(rng, 1, BINIDX_PORTABLE);
            (wide ? binidx_randperm_64 : binidx_randperm_32)(rng, n, out);
            for (int64_t i = 0; i < n; i++) CHECK(out[i] >= 0 && out[i] < n && !seen[out[i]]++);
            free(out), free(seen);
        }
    free(rng);
}

/* The drawing of sample_index.c, from a buffer that is not aligned. */
static char *unaligned_lengths(char *raw) {
    int32_t lengths[] = {3, 7, 0, 4};
    return memcpy(raw + 2, lengths, sizeof lengths);
}

static binidx_samples drawn_samples(const char *lengths, const int32_t *documents, int64_t extra, int64_t num_samples) {
    return (binidx_samples){lengths, 4, documents, 4, 4, extra, 14, num_samples};
}

static void check_rows(const binidx_samples *samples, const int32_t *needed) {
    int64_t num = samples->num_samples + 1, found;
    int32_t *narrow = heap(NULL, 8 * (size_t)num);
    int64_t *wide = heap(NULL, 16 * (size_t)num);
    CHECK(binidx_sample_index_4(samples, narrow, &found) == num && found == samples->num_tokens);
    CHECK(binidx_sample_index_8(samples, wide, &found) == num && found == samples->num_tokens);
    for (int64_t i = 0; i < 2 * num; i++) CHECK(narrow[i] == needed[i] && wide[i] == needed[i]);
    free(narrow), free(wide);
}

static void test_rows_of_the_drawing(void) {
    char *raw = heap(NULL, 2 + 16), *lengths = unaligned_lengths(raw);
    int32_t *documents = heap((int32_t[]){0, 1, 2, 3}, 16);
    binidx_samples extra = drawn_samples(lengths, documents, 1, 3), none = drawn_samples(lengths, documents, 0, 3);
    check_rows(&extra, (int32_t[]){0, 0, 1, 1, 1, 5, 3, 2});
    check_rows(&none, (int32_t[]){0, 0, 1, 1, 1, 5, 3, 2});
    extra.num_samples = none.num_samples = 4; /* the last is cut short: 1 and 2 tokens past the third */
    check_rows(&extra, (int32_t[]){0, 0, 1, 1, 1, 5, 3, 2, 3, 3});
    check_rows(&none, (int32_t[]){0, 0, 1, 1, 1, 5, 3, 2, 3, 4});
    free(raw), free(documents);
}

/* Document 2 has no tokens: with an extra token its end is no place, so the last one with tokens ends the sample. */
static void test_a_stream_that_ends_in_an_empty_document(void) {
    char *raw = heap(NULL, 2 + 16), *lengths = unaligned_lengths(raw);
    int32_t *documents = heap((int32_t[]){0, 3, 1, 2}, 16);
    binidx_samples extra = drawn_samples(lengths, documents, 1, 4), none = drawn_samples(lengths, documents, 0, 4);
    check_rows(&extra, (int32_t[]){0, 0, 1, 1, 2, 1, 2, 5, 2, 6});
    check_rows(&none, (int32_t[]){0, 0, 1, 1, 2, 1, 2, 5, 3, 0});
    free(raw), free(documents);
}

static int64_t code_of(binidx_samples samples, int64_t *found) {
    int32_t *rows = heap(NULL, 8 * (size_t)(samples.num_samples + 1));
    int64_t code = binidx_sample_index_4(&samples, rows, found);
    free(rows);
    return code;
}

static void test_bad_documents_lengths_and_tokens_are_codes(void) {
    char *raw = heap(NULL, 2 + 16), *lengths = unaligned_lengths(raw);
    int32_t *documents = heap((int32_t[]){0, 1, 2, 3}, 16);
    binidx_samples samples = drawn_samples(lengths, documents, 1, 3);
    int64_t found;
    documents[2] = 4;
    CHECK(code_of(samples, &found) == BINIDX_BAD_DOCUMENT && found == 2);
    documents[2] = -1;
    CHECK(code_of(samples, &found) == BINIDX_BAD_DOCUMENT && found == 2);
    documents[2] = 0; /* 17 tokens, not 14: more would be cut off, fewer would run out */
    CHECK(code_of(samples, &found) == BINIDX_BAD_TOKENS && found == 17);
    documents[1] = documents[2] = 2;
    CHECK(code_of(samples, &found) == BINIDX_BAD_TOKENS && found == 7);
    samples.num_tokens = 7; /* right, but not the samples */
    CHECK(code_of(samples, &found) == BINIDX_BAD_TOKENS);
    samples = (binidx_samples){lengths, 4, documents, 0, 4, 1, 0, 1};
    CHECK(code_of(samples, &found) == BINIDX_BAD_TOKENS && found == 0);
    samples.num_samples = 0;
    CHECK(code_of(samples, &found) == 1);
    memcpy(lengths, &(int32_t){-3}, 4);
    samples = drawn_samples(lengths, documents, 1, 3);
    CHECK(code_of(samples, &found) == BINIDX_BAD_LENGTH && found == 0);
    memset(lengths, 0, 16); /* since they were summed, as a file may be written to meanwhile */
    int32_t *rows = heap(NULL, 40);
    CHECK(binidx_sample_end_4(&(binidx_samples){lengths, 4, documents, 4, 4, 1, 14, 4}, rows) == BINIDX_BAD_TOKENS);
    free(rows);
    free(raw), free(documents);
}

static void check_blend(const int16_t *datasets, const int64_t *samples, int64_t size, const char *needed) {
    int64_t drawn[8] = {0};
    for (int64_t s = 0; s < size; s++) {
        CHECK(datasets[s] == needed[s] - '0');
        CHECK(samples[s] == drawn[datasets[s] & 7]++);
    }
}

static void weighted(const double *weights, int64_t num_datasets, const char *needed) {
    int64_t size = (int64_t)strlen(needed);
    double *own = heap(weights, 8 * (size_t)num_datasets), *counts = heap(NULL, 8 * (size_t)num_datasets);
    int16_t *datasets = heap(NULL, 2 * (size_t)size);
    int64_t *samples = heap(NULL, 8 * (size_t)size);
    binidx_blend_weighted(own, num_datasets, size, counts, datasets, samples);
    check_blend(datasets, samples, size, needed);
    free(own), free(counts), free(datasets), free(samples);
}

static void exhaustive(const int64_t *sizes, int64_t num_datasets, const char *needed) {
    int64_t total = (int64_t)strlen(needed), *own = heap(sizes, 8 * (size_t)num_datasets);
    double *weights = heap(NULL, 8 * (size_t)num_datasets), *counts = heap(NULL, 8 * (size_t)num_datasets);
    int16_t *open = heap(NULL, 2 * (size_t)num_datasets), *datasets = heap(NULL, 2 * (size_t)total);
    int64_t *samples = heap(NULL, 8 * (size_t)total);
    binidx_blend_exhaustive(own, num_datasets, total, weights, counts, open, datasets, samples);
    check_blend(datasets, samples, total, needed);
    free(own), free(weights), free(counts), free(open), free(datasets), free(samples);
}

static void test_blends_by_hand(void) {
    weighted((double[]){1}, 1, "0000");
    weighted((double[]){0.5, 0.5}, 2, "01010101");
    weighted((double[]){0.5, 0.25, 0.25}, 3, "012001200");
    weighted((double[]){0.25, 0.75}, 2, "10110");
    weighted((double[]){0.5, 0.5}, 2, "");
    exhaustive((int64_t[]){4}, 1, "0000");
    exhaustive((int64_t[]){0, 2, 0, 1, 0}, 5, "131");
    exhaustive((int64_t[]){0, 2, 2}, 3, "1212"); /* at the third sample all three are behind by 0 */
    exhaustive((int64_t[]){0, 0}, 2, "");
    exhaustive((int64_t[]){2, 2}, 2, "0101");
}

static void test_ranges_of_blocks_by_hand(void) {
    uint8_t good[5] = {1, 1, 0, 1, 1};
    int64_t addresses[3] = {1000, 0, 5000}, used[3] = {0, 0, 0}, places[4];
    binidx_blocks b = {good, addresses, used, 45, 10, 20, 7};
    int64_t here[4] = {3, 20, 40, 45}, crossing[2] = {15, 21}, unmapped[2] = {30, 31}, past[2] = {44, 46}, empty[2] = {5, 5};
    int64_t bad[2] = {15, 16};
    CHECK(binidx_place_ranges(&b, here, 2, places) == 3);
    CHECK(places[0] == 1003 && places[1] == 1020 && places[2] == 5000 && places[3] == 5005);
    CHECK(used[0] == 7 && used[1] == 0 && used[2] == 7);
    CHECK(binidx_place_ranges(&b, crossing, 1, places) == BINIDX_NOT_HERE);
    CHECK(binidx_place_ranges(&b, unmapped, 1, places) == BINIDX_NOT_HERE);
    CHECK(binidx_place_ranges(&b, past, 1, places) == BINIDX_NOT_HERE);
    CHECK(binidx_place_ranges(&b, empty, 1, places) == 0 && places[0] == places[1]);
    CHECK(binidx_place_ranges(&b, here, 2, here) == 3 && here[0] == 1003 && here[3] == 5005);
    good[1] = 0;
    CHECK(binidx_place_ranges(&b, bad, 1, places) == BINIDX_NOT_HERE);
}

/* Sequences 7 8 9 and 4 5, read in this order, two tokens a sample: 7 8 (9) and 9 4 (5). */
static void test_a_batch_by_hand(void) {
    uint16_t *map = heap((uint16_t[]){7, 8, 9, 4, 5}, 10);
    int32_t *lengths = heap((int32_t[]){3, 2}, 8), *rows = heap((int32_t[]){0, 0, 0, 2, 1, 1}, 24);
    int32_t *documents = heap((int32_t[]){0, 1}, 8);
    int64_t *pointers = heap((int64_t[]){0, 6}, 16), *spans = heap((int64_t[]){0, 1, 2, -1, 0, 2, 0, 2, 2}, 72);
    uint32_t *shuffled = heap((uint32_t[]){1, 0}, 8);
    binidx_orders o = {{lengths, pointers, 2, 2, 8}, shuffled, rows, documents, 2, 2, 2, 0, 0, 1};
    int64_t *ranges = heap(NULL, 48), places[2] = {0, 1}, served[2] = {0, -1};
    CHECK(binidx_locate_spans(&o.sequences, spans, 2, ranges) == 2);
    CHECK(ranges[0] == 2 && ranges[1] == 6 && ranges[2] == 6 && ranges[3] == 10);
    CHECK(binidx_locate_spans(&o.sequences, spans, 3, ranges) == 2);
    int64_t which[2], counted[3];
    int32_t *sequences = heap(NULL, 12), *starts = heap(NULL, 8), *stops = heap(NULL, 8);
    CHECK(binidx_served_rows(&o, served, 2, which) == 2 && binidx_count_spans(&o, which, 2, counted) == 3);
    binidx_sample_ends(&o, which, 2, counted, sequences, starts, stops); /* 9 4 (5), then 7 8 (9) */
    CHECK(sequences[0] == 0 && sequences[1] == 1 && sequences[2] == 0);
    CHECK(starts[0] == 2 && stops[0] == 2 && starts[1] == 0 && stops[1] == 3);
    int64_t tokens[4], labels[4], positions[4], *scratch = heap(NULL, 8 * (5 + 5 * 3));
    int32_t bounds[6], longest[2], text[6];
    float loss_mask[4];
    binidx_gather g = {.rows = places, .num_samples = 2, .num_rows = 2, .sequence_length = 2, .pad = 4, .extra = 1,
                       .starts = BINIDX_EACH_PIECE, .tokens = tokens, .labels = labels, .positions = positions,
                       .loss_mask = loss_mask, .cu_seqlens = bounds, .max_seqlen = longest};
    binidx_mapping mapping = {.base = (int64_t)(uintptr_t)map, .size = 10};
    CHECK(binidx_read_samples(&o, served, &mapping, &g, scratch, 3, BINIDX_PORTABLE) == 3 && mapping.num_bytes == 12);
    CHECK(tokens[0] == 9 && tokens[1] == 0 && labels[0] == 0 && labels[1] == 5); /* 4 is the pad */
    CHECK(loss_mask[0] == 0 && loss_mask[1] == 1 && positions[0] == 0 && positions[1] == 0);
    CHECK(bounds[0] == 0 && bounds[1] == 1 && bounds[2] == 2 && longest[0] == 1);
    CHECK(tokens[2] == 7 && tokens[3] == 8 && labels[3] == 9 && bounds[3] == 0 && bounds[4] == 2 && longest[1] == 2);
    CHECK(binidx_read_samples(&o, served, &mapping, &g, scratch, 2, BINIDX_PORTABLE) == 3 && mapping.num_bytes == 12);
    g.text = text;
    CHECK(binidx_read_samples(&o, served, &mapping, &g, scratch, 3, BINIDX_PORTABLE) == 3);
    CHECK(text[0] == 9 && text[1] == 4 && text[2] == 5 && text[3] == 7 && text[4] == 8 && text[5] == 9);
    lengths[1] = 1; /* sample 1 reads 9 and no more than its extra token of the other */
    rows[4] = 1, rows[5] = 0;
    g.text = NULL;
    CHECK(binidx_read_samples(&o, served, &mapping, &g, scratch, 3, BINIDX_PORTABLE) == 3);
    CHECK(bounds[0] == 0 && bounds[1] == 2 && bounds[2] == 2 && longest[0] == 2); /* and the pad is the first's */
    served[0] = 2;
    CHECK(binidx_read_samples(&o, served, &mapping, &g, scratch, 3, BINIDX_PORTABLE) == BINIDX_BAD_DOCUMENT);
    free(map), free(lengths), free(rows), free(documents), free(pointers), free(spans), free(shuffled), free(ranges);
    free(scratch), free(sequences), free(starts), free(stops);
}

static void test_wrap_rows(void) {
    uint32_t ids[] = {5, 6, 7, 8}, prefix[] = {1}, suffix[] = {0, 2}, wide[13];
    int64_t offsets[] = {0, 2, 3, 3, 4};
    uint16_t out[13];
    binidx_wrapping w = {ids, offsets, prefix, suffix, out, 4, 4, 1, 2, 13, 0xffff, 2, 0};
    uint16_t filled[] = {1, 5, 6, 0, 2, 1, 7, 0, 2, 1, 8, 0, 2};
    CHECK(binidx_wrap_rows(&w) == 13 && memcmp(out, filled, sizeof filled) == 0);
    w.room = 12;
    CHECK(binidx_wrap_rows(&w) == BINIDX_BAD_TOKENS);
    w.empty_too = 1, w.room = 13, w.num_suffix = 1;
    CHECK(binidx_wrap_rows(&w) == 12 && out[7] == 1 && out[8] == 0 && out[9] == 1 && out[11] == 0);
    w.out = wide, w.item_bytes = 4, w.largest = 0x7fffffff;
    CHECK(binidx_wrap_rows(&w) == 12 && wide[7] == 1 && wide[8] == 0 && wide[10] == 8);
    ids[3] = 0x80000000;
    CHECK(binidx_wrap_rows(&w) == BINIDX_BAD_ID);
    offsets[4] = 5;
    CHECK(binidx_wrap_rows(&w) == BINIDX_BAD_DOCUMENT);
}

/* The picture of best_fit.c. */
static void test_best_fit(void) {
    int32_t lengths[] = {3, 7, 2, 5, 1, 2};
    int64_t pieces[6], bounds[7], bin_of[6], next[6], heads[9];
    uint64_t open[1];
    binidx_packing p = {lengths, 6, 8, pieces, bounds, bin_of, next, heads, open, NULL};
    int64_t wanted[] = {1, 4, 3, 0, 2, 5}, starts[] = {0, 2, 4, 6};
    CHECK(binidx_best_fit(&p) == 3);
    CHECK(memcmp(pieces, wanted, sizeof wanted) == 0 && memcmp(bounds, starts, sizeof starts) == 0);
    lengths[2] = 9;
    CHECK(binidx_best_fit(&p) == BINIDX_BAD_LENGTH);
    lengths[2] = 0;
    CHECK(binidx_best_fit(&p) == BINIDX_BAD_LENGTH);
    p.num_pieces = 0;
    CHECK(binidx_best_fit(&p) == 0);
}

/* The picture of first_fit.c. */
static void test_first_fit(void) {
    int32_t lengths[] = {3, 7, 2, 5, 1, 2}, rooms[16] = {0};
    int64_t pieces[6], bounds[7], bin_of[6], wanted[] = {0, 2, 4, 5, 1, 3}, starts[] = {0, 4, 5, 6};
    binidx_packing p = {.lengths = lengths, .num_pieces = 6, .capacity = 8, .pieces = pieces, .bounds = bounds,
                        .bin_of = bin_of, .rooms = rooms};
    CHECK(binidx_first_fit_nodes(6) == 16 && binidx_first_fit(&p) == 3);
    CHECK(memcmp(pieces, wanted, sizeof wanted) == 0 && memcmp(bounds, starts, sizeof starts) == 0);
    lengths[2] = 9;
    CHECK(binidx_first_fit(&p) == BINIDX_BAD_LENGTH);
    lengths[2] = 0;
    CHECK(binidx_first_fit(&p) == BINIDX_BAD_LENGTH);
    p.num_pieces = 0;
    CHECK(binidx_first_fit(&p) == 0);
}

/* By the C++ standard the ten-thousandth word of seed 5489; the first is that of the paper's own program. */
static void test_mt19937_64_is_the_standard_one(void) {
    binidx_mt19937_64 *rng = heap(NULL, sizeof *rng);
    binidx_mt19937_64_seed(rng, 5489);
    CHECK(next_wide_word(rng) == 14514284786278117030u && rng->position == 1);
    for (int i = 1; i < 9999; i++) next_wide_word(rng);
    CHECK(next_wide_word(rng) == 9981545732273789042u);
    free(rng);
}

/* The drawing of masked_mapping.c, then a document of one sequence that is too long, then an empty one. */
static void test_masked_samples_by_hand(void) {
    int32_t *lengths = heap((int32_t[]){3, 4, 5, 2, 2, 6, 1, 1, 600, 9}, 40), *titles = heap((int32_t[]){0, 1, 2, 3}, 16);
    int64_t *documents = heap((int64_t[]){0, 8, 9, 9, 10}, 40), counts[3], epochs;
    uint32_t *usable = heap(NULL, 16);
    binidx_masked m = {documents, lengths, NULL, 4, 10, 9, 0, 1};
    binidx_mt19937 *rng = heap(NULL, sizeof *rng);
    binidx_mt19937_seed(rng, 1, BINIDX_PORTABLE);
    CHECK(binidx_usable_documents(&m, usable, counts) == 3 && counts[0] == 1 && counts[1] == 2 && counts[2] == 0);
    CHECK(usable[0] == 25 && usable[1] == 601 && usable[2] == 0 && usable[3] == 10);
    CHECK(binidx_count_masked(&m, usable, rng, 9, 6, &epochs) == 10 && epochs == 2);
    CHECK(binidx_count_masked(&m, usable, rng, 9, 10, &epochs) == 10 && epochs == 2);
    CHECK(binidx_count_masked(&m, usable, rng, 1, 6, &epochs) == 5 && epochs == 1);
    CHECK(binidx_count_masked(&m, usable, rng, 1, 0, &epochs) == 0 && epochs == 0);
    uint32_t *rows = heap(NULL, 120), needed[] = {0, 3, 9, 3, 6, 9, 6, 8, 9, 8, 9, 9, 9, 10, 9};
    CHECK(binidx_masked_rows_4(&m, usable, rng, 2, 10, rows) == 10);
    CHECK(memcmp(rows, needed, 60) == 0 && memcmp(rows + 15, needed, 60) == 0);
    CHECK(binidx_masked_rows_4(&m, usable, rng, 2, 9, rows) == BINIDX_BAD_TOKENS);
    m.titles = titles; /* blocks: of two sequences at least, and two are left */
    m.least = 2;
    CHECK(binidx_usable_documents(&m, usable, counts) == 1 && usable[0] == 25 && usable[1] == 0);
    uint32_t blocks[] = {0, 3, 0, 0, 3, 6, 0, 1, 6, 8, 0, 2};
    CHECK(binidx_masked_rows_4(&m, usable, rng, 1, 3, rows) == 3 && memcmp(rows, blocks, 48) == 0);
    lengths[3] = lengths[4] = -40, titles[0] = 89; /* lengths and a target below 0: nothing overflows */
    CHECK(binidx_usable_documents(&m, usable, counts) == 1 && usable[0] == UINT32_MAX);
    CHECK(binidx_count_masked(&m, usable, rng, 1, 1, &epochs) == 4);
    documents[2] = 7;
    CHECK(binidx_usable_documents(&m, usable, counts) == BINIDX_BAD_DOCUMENT && counts[0] == 1);
    documents[2] = 9, documents[1] = 11;
    CHECK(binidx_masked_rows_4(&m, usable, rng, 1, 3, rows) == BINIDX_BAD_DOCUMENT);
    free(lengths), free(titles), free(documents), free(usable), free(rng), free(rows);
}

static void test_pieces_in_another_order_by_hand(void) {
    uint8_t *from = heap("aaabccdddd", 10), *to = heap(NULL, 9);
    int64_t *bounds = heap((int64_t[]){0, 3, 4, 6, 10}, 40), *order = heap((int64_t[]){2, 0, 3}, 24);
    CHECK(binidx_copy_pieces(from, 10, bounds, 4, order, 3, to, 9) == 9 && !memcmp(to, "ccaaadddd", 9));
    CHECK(binidx_copy_pieces(from, 10, bounds, 4, order, 3, to, 8) == BINIDX_BAD_TOKENS);
    CHECK(binidx_copy_pieces(from, 9, bounds, 4, order, 3, to, 9) == BINIDX_BAD_LENGTH);
    CHECK(binidx_copy_pieces(from, 10, bounds, 3, order, 3, to, 9) == BINIDX_BAD_DOCUMENT);
    CHECK(binidx_copy_pieces(from, 10, bounds, 4, order, 0, to, 0) == 0);
    order[0] = -1;
    CHECK(binidx_copy_pieces(from, 10, bounds, 4, order, 3, to, 9) == BINIDX_BAD_DOCUMENT);
    free(from), free(to), free(bounds), free(order);
}

/* "abab" and "ba" in tokens of a table, over the ends of calls, and of documents in vain. */
static void test_patterns_in_documents_by_hand(void) {
    uint8_t *bytes = heap("ababba", 6), *marks = heap(NULL, 64), *text = heap(NULL, 64), *table = heap(NULL, 3 + 16);
    int64_t *bounds = heap((int64_t[]){0, 4, 6}, 24), *hits = heap(NULL, 4 * 32), *rows = heap((int64_t[]){0, 0}, 16);
    int32_t *heads = heap(NULL, 4 * 256), *next = heap(NULL, 8), *offsets = heap((int32_t[]){0, 2, 3}, 12);
    uint16_t *tokens = heap((uint16_t[]){1, 0, 0, 1, 0}, 10); /* b ab ab b | ab */
    int64_t *documents = heap((int64_t[]){0, 4, 5}, 24), *rest = heap((int64_t[]){0, 1}, 16);
    binidx_patterns p = {.bytes = bytes, .bounds = bounds, .num_patterns = 2, .unit = 1, .longest = 4, .window = 2,
                         .block = 2, .stride = 1, .bits = 8, .head_bits = 8, .sampled = marks, .ends = marks + 32, .heads = heads, .next = next};
    CHECK(binidx_index_patterns(&p) == 2);
    memcpy(table, "abb", 3);
    binidx_scan s = {.patterns = &p, .bytes = table, .offsets = offsets, .vocab_size = 2, .longest_token = 2,
                     .item_bytes = 2, .text = text, .room = 64, .hits = hits, .room_hits = 4, .rows = rows};
    CHECK(binidx_scan_documents(&s, tokens, documents, 2, 1) == 2 && s.num_hits == 2 && s.held == 2 && s.before == 0);
    int64_t found[] = {0, 1, 2, 0, 0, 0, 1, 1}; /* "ba" twice from byte 0 on, "abab" from 1 on: babab b */
    CHECK(!memcmp(hits, found, sizeof found));
    s.num_hits = 0, tokens[0] = 0; /* the second document goes on: ab + ab */
    CHECK(binidx_scan_documents(&s, tokens, rest, 1, 0) == 1 && s.num_hits == 2 && s.held == 0);
    CHECK(hits[1] + hits[5] == 1 && hits[2] == 1 && hits[6] == 1 && hits[3] + hits[7] == 1);
    s.num_hits = 0, s.room_hits = 3;
    CHECK(binidx_scan_documents(&s, tokens, documents, 2, 0) == 1); /* the hits have no room for two patterns more */
    tokens[0] = 2, s.num_hits = 0;
    CHECK(binidx_scan_documents(&s, tokens, rest, 1, 0) == BINIDX_BAD_ID && s.bad_token == 0);
    p.window = 4;
    CHECK(binidx_index_patterns(&p) == BINIDX_BAD_LENGTH);
    free(bytes), free(marks), free(text), free(table), free(bounds), free(hits), free(rows), free(heads), free(next);
    free(offsets), free(tokens), free(documents), free(rest);
}

/* "Aa", a blank, and U+00E9 in two pieces, then a part of one that ",b" ends: a a blank, U+00E9, blank, b. */
static void test_a_text_is_folded_by_hand(void) {
    int32_t *pages = heap(NULL, 4 * 0x1100), *folds = heap(NULL, 4 * 2 * 256);
    int64_t *origins = heap(NULL, 8 * 8);
    uint8_t *bytes = heap("\1a\1 ", 4), *folded = heap(NULL, 8);
    memset(folds, 255, 4 * 2 * 256), folds['A'] = 0, folds[','] = 2;
    for (int page = 0; page < 0x1100; page++) pages[page] = page > 0;
    binidx_folding f = {.pages = pages, .folds = folds, .bytes = bytes};
    CHECK(binidx_fold_text(&f, (const uint8_t *)"Aa, \xc3", 5, folded, origins) == 3 && f.num_part == 1 && f.blank == 1);
    CHECK(!memcmp(folded, "aa ", 3) && origins[0] == 0 && origins[1] == 1 && origins[2] == 2);
    CHECK(binidx_fold_text(&f, (const uint8_t *)"\xa9\xe2\x82,b", 5, folded, origins) == 4 && f.num_part == 0 && f.blank == 0);
    CHECK(!memcmp(folded, "\xc3\xa9 b", 4) && origins[0] == -1 && origins[1] == -1 && origins[2] == 1 && origins[3] == 4);
    free(pages), free(folds), free(origins), free(bytes), free(folded);
}

int main(void) {
    test_a_text_is_folded_by_hand();
    test_patterns_in_documents_by_hand();
    test_mt19937_64_is_the_standard_one();
    test_masked_samples_by_hand();
    test_check_index();
    test_wrap_rows();
    test_best_fit();
    test_first_fit();
    test_mt19937_is_the_standard_one();
    test_shuffles_of_0_1_and_some_more();
    test_orders_of_seed_0();
    test_targets_are_within_their_step();
    test_randperm_is_a_permutation();
    test_rows_of_the_drawing();
    test_a_stream_that_ends_in_an_empty_document();
    test_bad_documents_lengths_and_tokens_are_codes();
    test_blends_by_hand();
    test_ranges_of_blocks_by_hand();
    test_a_batch_by_hand();
    test_pieces_in_another_order_by_hand();
    if (failures) fprintf(stderr, "%d checks failed\n", failures);
    return failures ? 1 : 0;
}
