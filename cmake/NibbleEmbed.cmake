# The description of the API, src/server/openapi.json, as a C array in the server.
set(openapi_json ${PROJECT_SOURCE_DIR}/src/server/openapi.json)
set(openapi_c ${PROJECT_BINARY_DIR}/openapi_json.c)
add_custom_command(
    OUTPUT ${openapi_c}
    COMMAND ${CMAKE_COMMAND} -DIN=${openapi_json} -DOUT=${openapi_c}
            -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${openapi_json} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    VERBATIM)
