// Shares the items of a call for statistics among torch's threads.
#include "statistics_call.h"

#include "deal.h"
#include "driver.h"

namespace headwise {

void attend_statistics(const Problem& p, const Statistics& statistics) {
  const Kernels& set = kernels();
  const int64_t workers = workers_for(estimate(p));
  const Deal deal = deal_rows(p, set.plan_statistics(p, statistics), workers);
  const int64_t items = deal.plan.groups(p);
  const auto item = [&](int64_t i, char* scratch) {
    set.run_statistics(p, deal.plan, statistics, deal.item(i, items), scratch);
  };
  share(workers, items, deal.plan.scratch_bytes, item, scratch_of);
}

void attend_received(const Problem& p, const Received& received) {
  const Kernels& set = kernels();
  const int64_t workers = workers_for(estimate(p));
  const ReceivedDeal deal = deal_received(p, set.plan_received(p), workers);
  const auto item = [&](int64_t i, char* scratch) {
    const int64_t at = deal.order.empty() ? i : deal.order[static_cast<size_t>(i)];
    set.run_received(p, received, deal.plan, at, scratch);
  };
  share(workers, deal.plan.items, deal.plan.scratch_bytes, item, scratch_of);
}

}  // namespace headwise
