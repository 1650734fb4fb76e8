package sanity_test

import (
	"os"
	"testing"

	"github.com/onsi/ginkgo/v2"

	"github.com/csi-prepare/csi-prepare/sanity"
	"github.com/csi-prepare/csi-prepare/sanity/report"
)

// The tests of a driver that a test has started already. Ginkgo runs once in a
// process, so there is one call of Run in a test package.
func ExampleRun() {
	_ = func(t *testing.T) { // func TestConformance(t *testing.T)
		sanity.Run(t, &sanity.Config{Endpoint: "unix:///run/my-driver.sock", Grants: map[string]string{"data": "/srv/data"}})
	}
}

// The suite starts the driver itself: then it reads what the driver logs, kills
// it with SIGKILL and starts it again.
func ExampleRun_exec() {
	_ = func(t *testing.T) {
		sanity.Run(t, &sanity.Config{
			Exec:     []string{"./my-driver", "--node-id", "n1"}, // listens at $CSI_ENDPOINT
			StateDir: "/var/lib/my-driver",
			KnownFailing: report.Known{
				"idempotency.incompatible": "ours to repair: tracker.example.com/42",
			},
		})
	}
}

// Specs beside those of a Ginkgo suite that is there already. The rest of the
// configuration is read when the first spec runs.
func ExampleRegister() {
	var config sanity.Config
	suite := sanity.Register(&config)
	ginkgo.BeforeSuite(func() {
		config.Endpoint = "unix://" + os.Getenv("CSI_ENDPOINT")
	})
	ginkgo.AfterSuite(func() { suite.Stop() })
}

// A page for people, beside Ginkgo's own reports.
func ExampleConfig_report() {
	_ = sanity.Config{
		Endpoint: "unix:///run/my-driver.sock",
		Report: func(r *report.Report) error {
			f, err := os.Create("conformance.html")
			if err != nil {
				return err
			}
			defer f.Close()
			return r.WriteHTML(f)
		},
	}
}
