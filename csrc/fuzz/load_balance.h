// How evenly the items of calls spread over 2 to 256 threads.
#pragma once

namespace fuzz {

int check_load_balance();  // prints a table; returns 1 if a thread has too much work

}  // namespace fuzz
