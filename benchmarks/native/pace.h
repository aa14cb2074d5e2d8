/* The network between the store and the client: latency, rates, slow and dead requests.
 *
 * Which request is slow or dead is a function of the seed and the request's number only, so two
 * runs with the same number of requests meet the same faults.
 */
#ifndef PACE_H
#define PACE_H

struct pace_options {
    double latency_s;       /* before the first byte of a reply */
    double connection_rate; /* bytes/s of each reply; 0: no limit */
    double link_rate;       /* bytes/s of all replies together; 0: no limit */
    double slow_share, slow_factor; /* these take that many times the latency and the time */
    double stall_share;     /* these never end: half bring no body, half a part of it */
    unsigned long seed;
};
extern struct pace_options pace;

struct fate {
    int slow;
    double latency_s, rate;
    double stall_at; /* share of the body after which nothing comes; 2: it ends */
};

struct fate pace_fate(unsigned long request);
double pace_now_s(void);
void pace_sleep_until(double instant_s);
/* Waits for this many bytes' turn on the link; connections take turns. */
void pace_link(long bytes);
#endif
