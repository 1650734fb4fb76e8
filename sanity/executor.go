package sanity

var executorSections []writer
