/* fuzz_read_samples.c: any orders over any sequences of a map, at every level against their definition.
 *
 * Input, all of one byte: sequence length, samples, flags, served, rows of sample_index, documents, sequences, bytes of
 * the map, room; then of each sequence its length and pointer, each document, of each row of sample_index two numbers,
 * shuffle_index, of each sample its number and row; the rest is the map. Flags: 1 mask EOD, 2 an extra token, 4 int64
 * rows, 8 int64 shuffle, 16 numbers that may be anything, 32 and 64 where positions start, 128 two bytes a token.
 */
#include "fuzz_rows.h"

/* A byte: below `end`, or with `any` from -8 on. */
static int64_t number(fuzz_input *in, int64_t end, int any) {
    return any ? next(in, 1) - 8 : end > 0 ? next(in, 1) % end : 0;
}

static int64_t value_at(const void *array, int64_t i, int wide) {
    return wide ? ((const int64_t *)array)[i] : ((const int32_t *)array)[i];
}

static void put(void *array, int64_t i, int wide, int64_t value) {
    if (wide) ((int64_t *)array)[i] = value;
    else ((int32_t *)array)[i] = (int32_t)value;
}

/* The ranges of one sample by the plain rule, or -1 where it leads outside. */
static int64_t plain_ranges(const binidx_orders *o, int64_t served, int64_t size, int64_t *ranges) {
    const binidx_sequences *q = &o->sequences;
    if (served < 0) served += o->num_served;
    if (served < 0 || served >= o->num_served) return -1;
    int64_t row = value_at(o->shuffle_index, served, o->wide_shuffle), n = 0, at[4];
    if (row < 0 || row >= o->num_samples) return -1;
    for (int i = 0; i < 4; i++) at[i] = value_at(o->sample_index, 2 * row + i, o->wide_rows);
    int64_t first = at[0], start = at[1], last = at[2], end = at[3];
    if (first < 0 || last < first || last >= o->num_documents) return -1;
    for (int64_t p = first; p <= last; p++, start = 0, n++) {
        int64_t sequence = o->document_index[p];
        if (sequence < 0 || sequence >= q->num_sequences) return -1;
        int64_t length = ((const int32_t *)q->lengths)[sequence], stop = p < last ? length : end + o->extra;
        if (start < 0 || start > stop || stop > length) return -1;
        ranges[2 * n] = ((const int64_t *)q->pointers)[sequence] + start * q->item_bytes;
        ranges[2 * n + 1] = ranges[2 * n] + (stop - start) * q->item_bytes;
        if (ranges[2 * n] < 0 || ranges[2 * n + 1] > size) return -1;
    }
    return n;
}

enum { SAMPLES = 4, SERVED = 5, SAMPLE_ROWS = 5, DOCUMENTS = 12, SEQUENCES = 7 };

/* A call and its arrays, each as long as its contents. */
typedef struct {
    binidx_orders orders;
    binidx_gather gather;
    int32_t *lengths, *documents;
    int64_t *pointers, *served, *rows, bytes, room;
    void *sample_index, *shuffle_index;
    uint8_t *map;
} fuzz_case;

static void make_case(fuzz_case *c, fuzz_input *in) {
    binidx_gather *g = &c->gather;
    binidx_orders *o = &c->orders;
    g->pad = PAD, g->eod = EOD, g->num_rows = ROWS;
    g->sequence_length = 1 + next(in, 1) % 70, g->num_samples = next(in, 1) % (SAMPLES + 1);
    int flags = (int)next(in, 1), any = flags & 16;
    int64_t sequences, position = 0;
    int some = !any;
    o->num_served = some + next(in, 1) % SERVED, o->num_samples = some + next(in, 1) % SAMPLE_ROWS;
    o->num_documents = some + next(in, 1) % DOCUMENTS, sequences = some + next(in, 1) % SEQUENCES;
    c->bytes = 40 * some + next(in, 1), c->room = next(in, 1) % 32, o->sequences.num_sequences = sequences;
    o->sequences.dtype = flags & 128 ? 8 : 1, o->sequences.item_bytes = flags & 128 ? 2 : 1;
    g->mask_eod = flags & 1, g->extra = o->extra = flags >> 1 & 1, g->starts = (flags >> 5 & 3) % 3;
    o->wide_rows = flags >> 2 & 1, o->wide_shuffle = flags >> 3 & 1;
    o->sequences.lengths = c->lengths = bytes_of(4 * sequences);
    o->sequences.pointers = c->pointers = bytes_of(8 * sequences);
    o->document_index = c->documents = bytes_of(4 * o->num_documents), c->served = bytes_of(8 * g->num_samples);
    o->sample_index = c->sample_index = bytes_of((o->wide_rows ? 16 : 8) * (o->num_samples + 1));
    o->shuffle_index = c->shuffle_index = bytes_of((o->wide_shuffle ? 8 : 4) * o->num_served);
    g->rows = c->rows = bytes_of(8 * g->num_samples), c->map = bytes_of(c->bytes);
    for (int64_t i = 0; i < sequences; i++) {
        c->lengths[i] = (int32_t)next(in, 1) % 20;
        if (!any && c->lengths[i] > 3 && c->lengths[i] < 8) c->lengths[i] = 15;
        c->pointers[i] = number(in, c->bytes - 39, any);
    }
    for (int64_t i = 0; i < o->num_documents; i++) c->documents[i] = (int32_t)number(in, sequences, any);
    for (int64_t i = 0; i <= o->num_samples; i++) {
        position += any ? number(in, 0, 1) : next(in, 1) % 3 % 2 * (1 + next(in, 1) % 2);
        if (!any && position >= o->num_documents) position = o->num_documents - 1;
        put(c->sample_index, 2 * i, o->wide_rows, position);
        put(c->sample_index, 2 * i + 1, o->wide_rows, number(in, 4, any));
    }
    for (int64_t i = 0; i < o->num_served; i++)
        put(c->shuffle_index, i, o->wide_shuffle, any ? next(in, 1) : number(in, o->num_samples, 0));
    for (int64_t i = 0; i < g->num_samples; i++) {
        c->served[i] = number(in, o->num_served, any);
        c->rows[i] = number(in, ROWS, any);
    }
    for (int64_t i = 0; i < c->bytes; i++) c->map[i] = (uint8_t)next(in, 1);
}

static void free_case(fuzz_case *c) {
    free(c->lengths), free(c->documents), free(c->pointers), free(c->served), free(c->rows);
    free(c->sample_index), free(c->shuffle_index), free(c->map);
}

/* The ranges of all samples into `ranges`, and where each begins; whether all is right. *bytes: in all. */
static int plain_samples(const fuzz_case *c, int64_t *ranges, int64_t *bounds, int64_t *bytes) {
    int right = 1;
    *bytes = bounds[0] = 0;
    for (int64_t s = 0; s < c->gather.num_samples; s++) {
        int64_t n = plain_ranges(&c->orders, c->served[s], c->bytes, ranges + 2 * bounds[s]), found = 0;
        for (int64_t i = bounds[s]; i < bounds[s] + n; i++) found += ranges[2 * i + 1] - ranges[2 * i];
        int64_t most = (c->gather.sequence_length + c->gather.extra) * c->orders.sequences.item_bytes;
        right = right && n >= 0 && found <= most && c->rows[s] >= 0 && c->rows[s] < ROWS;
        bounds[s + 1] = bounds[s] + (n < 0 ? 0 : n), *bytes += found;
    }
    return right;
}

/* What binidx_sample_ends says, of the spans themselves. */
static void check_ends(const fuzz_case *c) {
    int64_t count = c->gather.num_samples, rows[SAMPLES], bounds[SAMPLES + 1];
    if (binidx_served_rows(&c->orders, c->served, count, rows) < count) return;
    int64_t n = binidx_count_spans(&c->orders, rows, count, bounds);
    if (n < 0) return;
    int64_t *spans = bytes_of(24 * n);
    int32_t *sequences = bytes_of(4 * n), *starts = bytes_of(4 * count), *stops = bytes_of(4 * count);
    binidx_sample_ends(&c->orders, rows, count, bounds, sequences, starts, stops);
    int right = binidx_sample_spans(&c->orders, rows, count, spans) == n;
    for (int64_t s = 0; right && s < count; s++) {
        const int64_t *last = spans + 3 * (bounds[s + 1] - 1);
        same(starts[s] == (int32_t)spans[3 * bounds[s] + 1] && stops[s] == (int32_t)(last[1] + last[2]));
        for (int64_t i = bounds[s]; i < bounds[s + 1]; i++) same(sequences[i] == spans[3 * i]);
    }
    free(spans), free(sequences), free(starts), free(stops);
}

static void check_case(fuzz_case *c, int level, int text) {
    int64_t ranges[2 * SAMPLES * DOCUMENTS], bounds[SAMPLES + 1], bytes;
    int right = plain_samples(c, ranges, bounds, &bytes);
    check_ends(c);
    binidx_gather *g = &c->gather;
    binidx_mapping mapping = {.base = (int64_t)(uintptr_t)c->map, .size = c->bytes};
    int64_t *scratch = bytes_of(8 * (2 * g->num_samples + 1 + 5 * c->room));
    make_rows(g, text);
    int64_t code = binidx_read_samples(&c->orders, c->served, &mapping, g, scratch, c->room, level);
    if (right) same(code == bounds[g->num_samples]);
    else same(code < 0 || code > c->room);
    int done = right && code <= c->room;
    if (done) same(mapping.num_bytes == bytes && mapping.disk_moved == 0);
    if (done) g->base = mapping.base, g->ranges = ranges, g->bounds = bounds;
    check_rows(g, done);
    if (level == BINIDX_PORTABLE) note_rows(g);
    free(scratch), free_rows(g);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    fuzz_case c = {0};
    make_case(&c, &in);
    for (int level = 0; level <= binidx_cpu_level(); level++)
        for (int text = 0; text < 2; text++) check_case(&c, level, text);
    free_case(&c);
    return 0;
}
