# The libraries that every build needs, as one target: lockstep_libraries.
add_library(lockstep_libraries INTERFACE)

# One sentence instead of CMake's page of text when a library is not there.
function(lockstep_need variable what package)
  if(NOT ${variable})
    message(FATAL_ERROR "${what} was not found: install it (apt-get install ${package}), or "
                        "name the folder above its include/ and lib/ with -DCMAKE_PREFIX_PATH=...")
  endif()
endfunction()

find_package(OpenMP COMPONENTS CXX QUIET)
lockstep_need(OpenMP_CXX_FOUND "OpenMP" g++)

# openblas_config.h stands beside OpenBLAS's own cblas.h; /usr/include may hold another library's.
set(folders openblas-pthread openblas-openmp openblas-serial openblas)
find_path(LOCKSTEP_OPENBLAS_INCLUDE openblas_config.h PATH_SUFFIXES ${folders})
find_library(LOCKSTEP_OPENBLAS_LIBRARY openblas PATH_SUFFIXES ${folders})
lockstep_need(LOCKSTEP_OPENBLAS_INCLUDE "OpenBLAS's cblas.h" libopenblas-dev)
lockstep_need(LOCKSTEP_OPENBLAS_LIBRARY "OpenBLAS" libopenblas-dev)

find_path(LOCKSTEP_CLI11_INCLUDE CLI/CLI.hpp HINTS ${LOCKSTEP_EXTRA_INCLUDE})
find_path(LOCKSTEP_JSON_INCLUDE nlohmann/json.hpp HINTS ${LOCKSTEP_EXTRA_INCLUDE})
lockstep_need(LOCKSTEP_CLI11_INCLUDE "CLI11" libcli11-dev)
lockstep_need(LOCKSTEP_JSON_INCLUDE "nlohmann-json" nlohmann-json3-dev)

target_include_directories(lockstep_libraries SYSTEM INTERFACE ${LOCKSTEP_OPENBLAS_INCLUDE}
                           ${LOCKSTEP_CLI11_INCLUDE} ${LOCKSTEP_JSON_INCLUDE})
target_link_libraries(lockstep_libraries INTERFACE OpenMP::OpenMP_CXX ${LOCKSTEP_OPENBLAS_LIBRARY})
mark_as_advanced(LOCKSTEP_OPENBLAS_INCLUDE LOCKSTEP_OPENBLAS_LIBRARY LOCKSTEP_CLI11_INCLUDE
                 LOCKSTEP_JSON_INCLUDE)
