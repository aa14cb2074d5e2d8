#define _GNU_SOURCE
#include "content.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TENSOR_BYTES (16L << 20)
static int period_fd;
static uint64_t *period;

static void die(const char *what) {
    perror(what);
    exit(1);
}

void content_make(void) {
    period_fd = memfd_create("content", 0);
    if (period_fd < 0 || ftruncate(period_fd, PERIOD_BYTES)) die("memfd");
    period = mmap(NULL, PERIOD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                  period_fd, 0);
    if (period == MAP_FAILED) die("mmap");
    for (long i = 0; i < PERIOD_BYTES / 8; i++) period[i] = (uint64_t)i * 0x9E3779B97F4A7C15u;
}

static char *make_header(long object_bytes) {
    char *header = malloc(HEADER_BYTES);
    uint64_t length = HEADER_BYTES - 8;
    memcpy(header, &length, 8);
    long used = 8, data_bytes = object_bytes - HEADER_BYTES;
    for (long start = 0, index = 0; start < data_bytes; start += TENSOR_BYTES, index++) {
        long end = start + TENSOR_BYTES < data_bytes ? start + TENSOR_BYTES : data_bytes;
        used += snprintf(header + used, HEADER_BYTES - used,
                         "%c\"tensor.%05ld\":{\"dtype\":\"BF16\",\"shape\":[%ld],"
                         "\"data_offsets\":[%ld,%ld]}",
                         start ? ',' : '{', index, (end - start) / 2, start, end);
        if (used >= HEADER_BYTES - 1) {
            fprintf(stderr, "an object of %ld bytes has too many tensors\n", object_bytes);
            exit(2);
        }
    }
    header[used++] = '}';
    memset(header + used, ' ', HEADER_BYTES - used);
    return header;
}

struct object content_object(const char *text) {
    const char *colon = strrchr(text, ':');
    long size = colon ? atol(colon + 1) : 0;
    if (size <= HEADER_BYTES || size % 8) {
        fprintf(stderr, "not an object (name:size, a multiple of 8 above 64 KiB): %s\n", text);
        exit(2);
    }
    return (struct object){strndup(text, colon - text), size, make_header(size)};
}

int content_send(struct wire *wire, const struct object *object, long start, long size) {
    while (size > 0) {
        long place = start % PERIOD_BYTES;
        long limit = start < HEADER_BYTES ? HEADER_BYTES - start : PERIOD_BYTES - place;
        long part = size < limit ? size : limit;
        int failed = start < HEADER_BYTES
                         ? wire_send(wire, object->header + start, part, size > part)
                         : wire_send_file(wire, period_fd, (char *)period, place, part);
        if (failed) return -1;
        start += part;
        size -= part;
    }
    return 0;
}
