/* read_samples.c: a micro-batch from sample numbers to filled rows, out of a mapped .bin.
 *
 *     served ─ locate.c ─► spans ─► ranges ─ read_ahead.c ─► (the disk) ─ gather.c ─► rows
 *     scratch  [rows of sample_index][bounds][spans, 3 each][ranges, 2 each]
 *
 * One call, so that the GIL is let go once and nothing is made in Python between the steps. What lies elsewhere takes
 * the same steps one by one, with a read between; so does what is mapped in blocks (place.c) when some are not. Cost: that of the steps, and two system calls where there is a disk.
 */
#include "binidx.h"

static int64_t disk_reads(const binidx_mapping *m) { return m->page_bytes ? binidx_disk_reads() : 0; }

int64_t binidx_read_spans(const binidx_sequences *sequences, const int64_t *spans, int64_t num_spans,
                          binidx_mapping *mapping, binidx_gather *gather, int64_t *ranges, int level) {
    if (binidx_locate_spans(sequences, spans, num_spans, ranges) < num_spans) return BINIDX_BAD_TOKENS;
    if (mapping->blocks) {
        mapping->num_chunks = binidx_place_ranges(mapping->blocks, ranges, num_spans, ranges);
        if (mapping->num_chunks < 0) return BINIDX_NOT_HERE;
    }
    int64_t before = disk_reads(mapping);
    int64_t page_bytes = mapping->ask_ahead ? mapping->page_bytes : 0;
    mapping->num_bytes = binidx_read_ahead(mapping->base, mapping->size, ranges, num_spans, page_bytes);
    if (mapping->num_bytes < 0) return mapping->num_bytes;
    gather->base = mapping->base, gather->ranges = ranges, gather->num_pieces = num_spans;
    gather->item_bytes = sequences->item_bytes, gather->dtype = sequences->dtype;
    int64_t code = binidx_gather_samples(gather, level), after = disk_reads(mapping);
    mapping->disk_moved = before < 0 || after != before;
    return code < 0 ? code : num_spans;
}

int64_t binidx_read_samples(const binidx_orders *orders, const int64_t *served, binidx_mapping *mapping,
                            binidx_gather *gather, int64_t *scratch, int64_t room, int level) {
    int64_t num_samples = gather->num_samples, *rows = scratch, *bounds = rows + num_samples;
    int64_t *spans = bounds + num_samples + 1, *ranges = spans + 3 * room;
    if (binidx_served_rows(orders, served, num_samples, rows) < num_samples) return BINIDX_BAD_DOCUMENT;
    int64_t pieces = binidx_count_spans(orders, rows, num_samples, bounds);
    if (pieces < 0 || pieces > room) return pieces;
    if (binidx_sample_spans(orders, rows, num_samples, spans) < 0) return BINIDX_BAD_DOCUMENT;
    gather->bounds = bounds;
    return binidx_read_spans(&orders->sequences, spans, pieces, mapping, gather, ranges, level);
}
