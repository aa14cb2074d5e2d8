/* A loopback server for benchmarks: one object in memory, served by range over HTTP/1.1.
 *
 *     range_server SIZE_BYTES
 *
 * Listens on a free port of 127.0.0.1, prints the port, and ends when its standard input closes.
 * Every path is the same object. Its contents: the 64-bit little-endian word at offset 8 i is
 * i * 0x9E3779B97F4A7C15 (mod 2^64), so that a client can check any place without a copy.
 *
 * GET and HEAD, `Range: bytes=A-B`, keep-alive, ETag. No authentication: what is measured is the
 * client. Bodies leave by sendfile from a memfd, so the server takes as little CPU as possible.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

enum { REQUEST_LIMIT = 16384 };
static int object_fd;
static long object_bytes;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void make_object(void) {
    object_fd = memfd_create("object", 0);
    if (object_fd < 0 || ftruncate(object_fd, object_bytes)) die("memfd");
    uint64_t *words = mmap(NULL, object_bytes, PROT_WRITE, MAP_SHARED, object_fd, 0);
    if (words == MAP_FAILED) die("mmap");
    for (long i = 0; i < object_bytes / 8; i++) words[i] = (uint64_t)i * 0x9E3779B97F4A7C15u;
    munmap(words, object_bytes);
}

static int send_all(int fd, const char *data, size_t size, int flags) {
    while (size > 0) {
        ssize_t sent = send(fd, data, size, flags | MSG_NOSIGNAL);
        if (sent <= 0) return -1;
        data += sent;
        size -= sent;
    }
    return 0;
}

static int answer(int fd, const char *head) {
    long first = 0, last = object_bytes - 1;
    const char *range = strcasestr(head, "\nrange:");
    int partial = range && sscanf(range + 7, " bytes=%ld-%ld", &first, &last) >= 1;
    if (last >= object_bytes) last = object_bytes - 1;
    if (first > last || first < 0) {
        static const char refusal[] =
            "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n";
        return send_all(fd, refusal, sizeof refusal - 1, 0);
    }
    char reply[512];
    int size = snprintf(reply, sizeof reply,
                        "HTTP/1.1 %s\r\nx-amz-request-id: 0123456789ABCDEF\r\n"
                        "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: \"benchmark\"\r\n"
                        "Accept-Ranges: bytes\r\nContent-Type: binary/octet-stream\r\n"
                        "Content-Length: %ld\r\n",
                        partial ? "206 Partial Content" : "200 OK", last - first + 1);
    if (partial)
        size += snprintf(reply + size, sizeof reply - size, "Content-Range: bytes %ld-%ld/%ld\r\n",
                         first, last, object_bytes);
    size += snprintf(reply + size, sizeof reply - size, "\r\n");
    int is_get = strncmp(head, "GET ", 4) == 0;
    if (send_all(fd, reply, size, is_get ? MSG_MORE : 0)) return -1;
    off_t position = first;
    while (is_get && position <= last)
        if (sendfile(fd, object_fd, &position, last + 1 - position) <= 0) return -1;
    return 0;
}

static void *serve(void *argument) {
    int fd = (int)(intptr_t)argument;
    char buffer[REQUEST_LIMIT + 1];
    size_t have = 0;
    for (;;) {
        buffer[have] = 0;
        char *end = strstr(buffer, "\r\n\r\n");
        if (end) {
            *end = 0;
            if (answer(fd, buffer)) break;
            have -= end + 4 - buffer;
            memmove(buffer, end + 4, have);
            continue;
        }
        ssize_t got = have < REQUEST_LIMIT ? recv(fd, buffer + have, REQUEST_LIMIT - have, 0) : 0;
        if (got <= 0) break;
        have += got;
    }
    close(fd);
    return NULL;
}

static void *end_with_owner(void *unused) {
    char byte;
    while (read(0, &byte, 1) > 0) {
    }
    exit(0);
    return unused;
}

int main(int count, char **arguments) {
    if (count != 2) {
        fprintf(stderr, "usage: range_server SIZE_BYTES\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    object_bytes = atol(arguments[1]);
    make_object();
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 256) ||
        getsockname(listener, (struct sockaddr *)&address, &size))
        die("listen");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    pthread_t thread;
    if (pthread_create(&thread, NULL, end_with_owner, NULL)) die("thread");
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) continue;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd)) close(fd);
        else pthread_detach(thread);
    }
}
