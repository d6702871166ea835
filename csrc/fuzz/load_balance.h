// How evenly the items of calls spread over 2 to 256 threads.
#pragma once

namespace fuzz {

int check_shares();  // prints a table; 1 where a thread has too much

}  // namespace fuzz
