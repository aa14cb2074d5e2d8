/* The floor: the least that a client in C needs to receive an object by ranges over HTTP/1.1.
 *
 *     range_client PORT OBJECT_BYTES TOTAL_BYTES CHUNK_BYTES CONNECTIONS
 *
 * One thread, connection and buffer per connection; chunks of the object, over and over, until
 * TOTAL_BYTES have come. `recv` with MSG_WAITALL straight into the buffer. Connections are open
 * and buffers touched before the measurement. Checks the first and last word of every chunk.
 * Prints one line of JSON: {"cpu_s": ..., "wall_s": ...}.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_LIMIT = 4096, WARM_ROUNDS = 2 };
static long port, object_bytes, total_bytes, chunk_bytes, connections;
static long next_chunk;
static pthread_barrier_t barrier;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int open_connection(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void check(const char *buffer, long offset, long size) {
    uint64_t word;
    memcpy(&word, buffer, 8);
    int good = word == (uint64_t)(offset / 8) * 0x9E3779B97F4A7C15u;
    memcpy(&word, buffer + size - 8, 8);
    good &= word == (uint64_t)((offset + size) / 8 - 1) * 0x9E3779B97F4A7C15u;
    if (!good) {
        fprintf(stderr, "wrong bytes at %ld\n", offset);
        exit(1);
    }
}

static void get(int fd, char *buffer, long offset, long size) {
    char head[HEAD_LIMIT];
    int length = snprintf(head, sizeof head,
                          "GET /bucket/object HTTP/1.1\r\nHost: 127.0.0.1:%ld\r\n"
                          "Range: bytes=%ld-%ld\r\n\r\n",
                          port, offset, offset + size - 1);
    if (send(fd, head, length, MSG_NOSIGNAL) != length) die("send");
    long have = 0;
    char *end = NULL;
    while (!end) {
        ssize_t got = recv(fd, head + have, sizeof head - have, 0);
        if (got <= 0) die("recv");
        have += got;
        end = memmem(head, have, "\r\n\r\n", 4);
    }
    if (memcmp(head + 9, "206", 3)) die("status");
    long body = have - (end + 4 - head);
    memcpy(buffer, end + 4, body);
    while (body < size) {
        ssize_t got = recv(fd, buffer + body, size - body, MSG_WAITALL);
        if (got <= 0) die("recv");
        body += got;
    }
    check(buffer, offset, size);
}

static void *work(void *unused) {
    char *buffer = mmap(NULL, chunk_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (buffer == MAP_FAILED) die("mmap");
    int fd = open_connection();
    for (int i = 0; i < WARM_ROUNDS; i++) get(fd, buffer, 0, chunk_bytes);
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    long chunks = total_bytes / chunk_bytes, chunks_of_object = object_bytes / chunk_bytes;
    for (;;) {
        long chunk = __sync_fetch_and_add(&next_chunk, 1);
        if (chunk >= chunks) break;
        get(fd, buffer, chunk % chunks_of_object * chunk_bytes, chunk_bytes);
    }
    pthread_barrier_wait(&barrier);
    return unused;
}

static double cpu_s(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static double wall_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

int main(int count, char **arguments) {
    if (count != 6) {
        fprintf(stderr, "usage: range_client PORT OBJECT TOTAL CHUNK CONNECTIONS\n");
        return 2;
    }
    port = atol(arguments[1]);
    object_bytes = atol(arguments[2]);
    total_bytes = atol(arguments[3]);
    chunk_bytes = atol(arguments[4]);
    connections = atol(arguments[5]);
    pthread_barrier_init(&barrier, NULL, connections + 1);
    for (long i = 0; i < connections; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) die("thread");
        pthread_detach(thread);
    }
    pthread_barrier_wait(&barrier);
    double cpu = cpu_s(), wall = wall_s();
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    printf("{\"cpu_s\": %.6f, \"wall_s\": %.6f}\n", cpu_s() - cpu, wall_s() - wall);
    return 0;
}
