#define _GNU_SOURCE
#include "pace.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>

struct pace_options pace = {.slow_factor = 1};
/* How late a turn may be asked for and still count as asked in time: threads wake up late. */
static const double GRACE_S = 0.002;

double pace_now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

void pace_sleep_until(double instant_s) {
    struct timespec until = {.tv_sec = (time_t)instant_s};
    until.tv_nsec = (instant_s - until.tv_sec) * 1e9;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
    }
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double free_s;  /* when all turns that were given are over */
static double weights; /* of all connections that send now */

void pace_begin(struct fate *fate) {
    pthread_mutex_lock(&lock);
    weights += fate->weight;
    pthread_mutex_unlock(&lock);
    fate->due_s = pace_now_s();
}

void pace_end(const struct fate *fate) {
    pthread_mutex_lock(&lock);
    weights -= fate->weight;
    pthread_mutex_unlock(&lock);
}

void pace_link(struct fate *fate, long bytes) {
    if (pace.link_rate <= 0) return;
    pthread_mutex_lock(&lock);
    double earliest_s = pace_now_s() - GRACE_S;
    if (free_s < earliest_s) free_s = earliest_s;
    double turn_ends_s = free_s += bytes / pace.link_rate;
    /* Turns alone would give a slow connection as much as any other. */
    fate->due_s += bytes / pace.link_rate * weights / fate->weight;
    if (fate->slow && turn_ends_s < fate->due_s) turn_ends_s = fate->due_s;
    pthread_mutex_unlock(&lock);
    pace_sleep_until(turn_ends_s);
}

static double draw(uint64_t number) {
    number += 0x9E3779B97F4A7C15u;
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9u;
    number = (number ^ number >> 27) * 0x94D049BB133111EBu;
    return ((number ^ number >> 31) >> 11) * 0x1p-53;
}

struct fate pace_fate(unsigned long request) {
    uint64_t number = ((uint64_t)pace.seed << 40) + 2 * request;
    double kind = draw(number), place = draw(number + 1);
    struct fate fate = {0, pace.latency_s, pace.connection_rate, 2, 1, 0};
    if (kind < pace.stall_share) {
        fate.stall_at = place < 0.5 ? 0 : 2 * place - 1;
    } else if (kind < pace.stall_share + pace.slow_share) {
        fate.slow = 1;
        fate.latency_s *= pace.slow_factor;
        fate.rate /= pace.slow_factor;
        fate.weight /= pace.slow_factor;
    }
    return fate;
}
