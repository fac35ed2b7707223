# Files of src/server that the program serves, as C arrays: the description of the API and the web page.
set(embedded_sources)
function(nibble_embed file name header)
    set(in ${PROJECT_SOURCE_DIR}/src/server/${file})
    set(out ${PROJECT_BINARY_DIR}/embedded/${name}.c)
    add_custom_command(
        OUTPUT ${out}
        COMMAND ${CMAKE_COMMAND} -DIN=${in} -DOUT=${out} -DNAME=${name} -DHEADER=${header}
                -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
        DEPENDS ${in} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
        VERBATIM)
    set(embedded_sources ${embedded_sources} ${out} PARENT_SCOPE)
endfunction()

nibble_embed(openapi.json nbi_openapi_json server/openapi.h)
nibble_embed(page/index.html nbi_page_html server/page_files.h)
nibble_embed(page/page.css nbi_page_css server/page_files.h)
foreach(script page chat live charts server base)
    nibble_embed(page/${script}.js nbi_page_${script}_js server/page_files.h)
endforeach()
